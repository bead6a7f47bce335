"""A small cache manager of our own with the seams of vLLM's, in the ways its releases count lookups."""

from __future__ import annotations

import enum
import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from kvmend.api import Context, Counters
from kvmend_fixes.vllm.prefix_stats import FIX, IN_PLACE, INLINE, RETURNED

#: How lookups are counted: attributes incremented by the lookup, `record` called by it (in a way that was looked into,
#: with a KV connector and without one, or in any), or also by the scheduler.
ALONE = "record, no connector"
GENERATIONS = {
    "in place": frozenset({IN_PLACE}),
    "record": frozenset({RETURNED}),
    ALONE: frozenset({RETURNED}),
    "record somehow": frozenset(),
    "inline": frozenset({INLINE, RETURNED}),
}


class RequestStatus(enum.IntEnum):
    """Those of vLLM's that a fix asks for, and one more."""

    WAITING = 1
    WAITING_FOR_FSM = 2
    WAITING_FOR_REMOTE_KVS = 3
    RUNNING = 4
    PREEMPTED = 5
    FINISHED_ABORTED = 6


class Stats:
    """Same attributes and call as vLLM's statistics of one step."""

    def __init__(self) -> None:
        self.reset = False
        self.requests = self.queries = self.hits = 0
        self.preempted_requests = self.preempted_queries = self.preempted_hits = 0

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        for name, value in (("requests", 1), ("queries", num_tokens), ("hits", num_hits)):
            name = f"preempted_{name}" if preempted else name
            setattr(self, name, getattr(self, name) + value)

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.requests, self.queries, self.hits

    @property
    def preempted(self) -> tuple[int, int, int]:
        return self.preempted_requests, self.preempted_queries, self.preempted_hits


_ids = itertools.count()


@dataclass(eq=False)
class Request:
    """What the seams read of a request."""

    num_tokens: int = 100
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    status: RequestStatus = RequestStatus.WAITING
    skip_reading_prefix_cache: bool = False
    sampling_params: Any = field(default_factory=lambda: SimpleNamespace(prompt_logprobs=None))

    def __post_init__(self) -> None:
        self.block_hashes: list[int] = []
        self.request_id = f"request {next(_ids)}"

    @property
    def preempted(self) -> bool:
        return self.num_preemptions > 0

    def run(self) -> None:
        """As after the step that admits it."""
        self.num_computed_tokens, self.status = self.num_tokens, RequestStatus.RUNNING

    def wait_again(self) -> None:
        self.num_computed_tokens, self.status = 0, RequestStatus.WAITING

    def preempt(self) -> None:
        self.num_computed_tokens, self.status = 0, RequestStatus.PREEMPTED
        self.num_preemptions += 1


@dataclass
class Rig:
    """A manager with the fix over its class, or a scheduler that has made one, and the counters of the fix."""

    manager: Any
    counters: Any
    generation: str
    scheduler: Any = None

    def lookup(self, request: Request, hits: int = 60) -> None:
        """Looks a request up on the generation's own path, as the scheduling loop does."""
        self.manager.found = hits
        if self.generation == "inline":
            self.manager.coordinator.find_longest_cache_hit_per_group(request.block_hashes, request.num_tokens)
            stats = self.manager.prefix_cache_stats
            if stats is not None:
                stats.record(request.num_tokens, hits, request.preempted)
        else:
            self.manager.get_computed_blocks(request)

    def admit(self, request: Request) -> bool:
        """Allocates, and on success the request has computed tokens, as after the step that ran it."""
        if self.manager.allocate_slots(request, 16, num_lookahead=0) is None:
            return False
        request.run()
        return True

    @property
    def counted(self) -> dict[str, int]:
        counted: dict[str, int] = self.counters.as_dict()
        return counted


def make_rig(
    generation: str,
    *,
    caching: bool = True,
    stats: bool = True,
    arity: int = 2,
    beneath: Mapping[str, Callable[[Any], Any]] | None = None,
    mamba: bool = True,
    scheduler: Callable[[type, type], Any] | None = None,
) -> Rig:
    """A manager of one generation with the fix's wrappers over its methods.

    Args:
        generation: One of `GENERATIONS`.
        caching: Whether the manager caches prefixes.
        stats: Whether it keeps statistics.
        arity: Number of values that a lookup returns.
        beneath: Wrappers of somebody else's that were there before the fix, by the method's name.
        mamba: Whether the model has Mamba layers.
        scheduler: Makes the scheduler that makes the manager, from the double of vLLM's scheduler class and the
            manager class; without it nobody's scheduler makes it, as in a loop of one's own.
    """

    class HybridKVCacheCoordinator:
        def find_longest_cache_hit_per_group(self, block_hashes: list[int], max_length: int) -> str:
            return f"per group {max_length}"

    class UnitaryKVCacheCoordinator:
        pass

    class KVCacheManager:
        def __init__(self) -> None:
            self.enable_caching = caching
            self.coordinator = HybridKVCacheCoordinator() if generation == "inline" else UnitaryKVCacheCoordinator()
            self.kv_cache_config = SimpleNamespace(has_mamba_layers=mamba)
            self.log_stats = stats
            self.prefix_cache_stats: Stats | None = Stats() if stats else None
            self.found = 0
            self.full = False
            self.broken = False
            self.during: Callable[[], Any] = lambda: None

        def get_computed_blocks(self, request: Request) -> tuple[Any, ...]:
            counters: Any = self.prefix_cache_stats if self.log_stats else None
            result = ("blocks", self.found, "more", "still more")[:arity]
            if generation != "in place" and (not self.enable_caching or request.skip_reading_prefix_cache):
                return result
            if counters is not None and self.enable_caching:
                if generation == "in place":
                    counters.requests += 1
                    counters.queries += request.num_tokens
                    counters.hits += self.found
                else:
                    counters.record(request.num_tokens, self.found, request.preempted)
            if self.broken:
                raise LookupError("the block table is broken")
            return result

        def allocate_slots(self, request: Request, num_new_tokens: int, num_lookahead: int = 4) -> Any:
            self.during()
            return None if self.full else (request, num_new_tokens, num_lookahead)

        def make_prefix_cache_stats(self) -> Stats | None:
            made = self.prefix_cache_stats
            if made is not None:
                self.prefix_cache_stats = Stats()
            return made

        def reset_prefix_cache(self) -> None:
            if self.prefix_cache_stats is not None:
                self.prefix_cache_stats.reset = True

    import logging

    upstream = upstream_scheduler()
    upstream.connector = None if generation == ALONE else "a connector"
    holders: dict[str, Any] = {each.__name__: each for each in (KVCacheManager, HybridKVCacheCoordinator, upstream)}
    features = GENERATIONS[generation]
    context = Context(
        mode="1",
        features=features,
        facts={},
        counters=Counters(FIX.counters, FIX.may_fall),
        log=logging.getLogger("vllm"),
    )
    for method, wrap in (beneath or {}).items():
        setattr(KVCacheManager, method, wrap(vars(KVCacheManager)[method]))
    with stand_ins():
        for site in FIX.sites_for("1", features):
            holder, _, name = site.qualname.partition(".")
            setattr(holders[holder], name, site.wrap(vars(holders[holder])[name], context))
    made = scheduler(upstream, KVCacheManager) if scheduler else None
    manager = made.kv_cache_manager if scheduler else KVCacheManager()
    return Rig(manager=manager, counters=context.counters, generation=generation, scheduler=made)


def stand_ins() -> Any:
    """What the fix imports from vLLM is that of the doubles, while this context manager is entered."""
    modules = {
        "vllm.v1.request": SimpleNamespace(RequestStatus=RequestStatus),
        "vllm.v1.metrics.stats": SimpleNamespace(PrefixCacheStats=Stats),
    }
    return mock.patch.dict(sys.modules, modules)


def forget(manager: Any) -> None:
    """Makes a manager one that was made before the fix came."""
    for name in [name for name in vars(manager) if name.startswith("_kvmend_") or name == "allocate_slots"]:
        delattr(manager, name)


_UPSTREAM = '''
class Output(list):
    def __init__(self, admitted):
        super().__init__(admitted)
        self.num_scheduled_tokens = {}


class Scheduler:
    """Looks every waiting request up, and admits those that it is told to."""

    def __init__(self, manager_class):
        self.kv_cache_manager = manager_class()
        self.ran = []
        self.during = lambda request: None

    @property
    def running(self):
        return [request for request in self.ran if request.status is RUNNING]

    def update_from_output(self, output):
        return self.kv_cache_manager.make_prefix_cache_stats()

    def schedule(self, waiting=(), admit=(), load=()):
        manager = self.kv_cache_manager
        self.ran = self.running
        for request in waiting:
            computed = request.num_computed_tokens
            if not computed:
                computed = manager.get_computed_blocks(request)[1]
            self.during(request)
            if request not in (*admit, *load) or manager.allocate_slots(request, 16) is None:
                continue
            request.status = LOADING if request in load else RUNNING
            if request.status is RUNNING:
                self.ran.append(request)
                request.num_computed_tokens = computed
            self.during(request)
        output = Output(request for request in waiting if request.status is RUNNING)
        for request in output:
            output.num_scheduled_tokens[request.request_id] = request.num_tokens - request.num_computed_tokens
            request.run()
        return output
'''


def upstream_scheduler() -> Any:
    """The double of vLLM's scheduler class."""
    return as_upstreams(_UPSTREAM, LOADING=RequestStatus.WAITING_FOR_REMOTE_KVS, RUNNING=RequestStatus.RUNNING)


def as_upstreams(source: str, **names: Any) -> Any:
    """The class `Scheduler` of some source, which is vLLM's own as far as its module's name says.

    Args:
        source: The source.
        names: What it finds in its module.
    """
    module = ModuleType("vllm.v1.core.sched.scheduler")
    vars(module).update(names)
    exec(source, vars(module))
    return module.Scheduler
