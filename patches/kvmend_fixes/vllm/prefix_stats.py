"""vllm-prefix-stats: a request's prefix-cache lookup is counted once, when the request is admitted."""

from __future__ import annotations

import ast
import functools
import inspect
import operator
import weakref
from collections.abc import Callable
from typing import Any

from kvmend.api import AFFECTED, FIXED, UNKNOWN, Body, BodySource, Context, Counters, Finding, Fix, Site, Sources
from kvmend_fixes.vllm import VLLM

WHY = """\
Symptom: `vllm:prefix_cache_queries` and `vllm:prefix_cache_hits` grow by more tokens than were sent, and the hit rate
that dashboards and autoscalers see is wrong, the more so the busier the server is.

Trigger: `KVCacheManager.get_computed_blocks` counts the lookup before the request is admitted. A request that is then
not admitted (no free KV blocks, a KV connector that answers "not yet", any other early exit of the scheduling loop)
stays in the waiting queue, is looked up again at the next step, and is counted again. A request that waits for a
thousand steps counts a thousand times."""

HOW = """\
What the original counts during a lookup is held back: while it runs, a stand-in takes the place of the manager's
statistics object and keeps the one pending lookup. When the same request is then admitted (`allocate_slots` returns
blocks and the request had none computed) it is settled into the statistics, once, by the original's own counters. A
new lookup, a failed admission or another request's allocation drops it; if it was dropped by a probe for somebody
else, the lookup is repeated at admission. On 0.24 - 0.26 `schedule()` itself looks up
and counts for hybrid (Mamba) models with a connector; there the counters are noted after the lookup and put back
unless the same request is admitted.

Safe because: what is scheduled does not depend on these counters; return values pass through untouched whatever their
number; the statistics object that others hold stays the same object between two `make_prefix_cache_stats` calls; at
most one lookup is kept per manager; nothing is copied from vLLM, so a scheduler of one's own is counted as well."""

REMOVE_WHEN = "The server runs vLLM 0.27.0 or later, which counts at admission itself; kvmend then says already_fixed."

_MANAGER = "vllm.v1.core.kv_cache_manager"
_COORDINATOR = "vllm.v1.core.kv_cache_coordinator"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_STATS = "vllm.v1.metrics.stats"

#: The lookup increments the statistics' attributes itself (0.8.5 - 0.11.0), instead of calling `record`.
IN_PLACE = "in-place-counters"
#: `schedule()` looks up and records past the lookup seam for hybrid models with a connector (0.24 - 0.26).
INLINE = "inline-lookup"

_LINK = "_kvmend_manager"
_COUNTS = ("requests", "queries", "hits")
_PREEMPTED = tuple(f"preempted_{name}" for name in _COUNTS)


class _Pending:
    """The one pending lookup of a manager; the stand-in for its statistics object while the original looks up.

    `record` and the three plain counters are what the two generations of the original use. `recorded` holds the
    arguments of `record`, `request` whose lookup it is; both None when nothing is pending. The `open_*` attributes
    belong to an inline lookup: the statistics it counts into, their values before, and the request's block hashes,
    which name the request because the coordinator is not told which one it is. `idle` is whether there is neither.
    """

    __slots__ = (
        "hits",
        "idle",
        "open_before",
        "open_hashes",
        "open_stats",
        "queries",
        "recorded",
        "request",
        "requests",
    )

    def __init__(self) -> None:
        self.idle = True
        self.request: Any = None
        self.recorded: tuple[int, int, bool] | None = None
        self.requests = self.queries = self.hits = 0
        self.open_stats: Any = None
        self.open_before: tuple[int, ...] = ()
        self.open_hashes: Any = None

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Same call as `PrefixCacheStats.record`: tokens looked up, tokens found, resumed after a preemption."""
        self.recorded = (num_tokens, num_hits, preempted)


def _adopt(manager: Any) -> _Pending:
    """Gives a manager its place for a pending lookup."""
    pending = manager._kvmend_pending = _Pending()
    return pending


def hold_lookup(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `KVCacheManager.get_computed_blocks(request)`: nothing it counts reaches the statistics yet."""
    in_place = IN_PLACE in context.features
    inline = INLINE in context.features
    counters = context.counters
    # Not counted lookup by lookup: whatever was held and not settled was dropped.
    counters.derive("dropped", lambda: counters.held - counters.settled)

    @functools.wraps(original)
    def get_computed_blocks(manager: Any, request: Any) -> Any:
        stats = manager.prefix_cache_stats
        if stats is None:
            return original(manager, request)
        try:
            pending = manager._kvmend_pending
        except AttributeError:
            pending = _adopt(manager)
        if inline and pending.open_stats is not None:
            _put_back(pending, counters)
        pending.recorded = None
        if in_place:
            pending.requests = pending.queries = pending.hits = 0
        manager.prefix_cache_stats = pending
        try:
            result = original(manager, request)
        finally:
            manager.prefix_cache_stats = stats
        if pending.recorded is not None or (in_place and pending.requests):
            pending.request = request
            pending.idle = False
            counters.held += 1
        else:
            pending.request = None
            pending.idle = True
        return result

    return get_computed_blocks


def settle_admission(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `KVCacheManager.allocate_slots(request, ...)`: an admission settles the pending lookup."""
    in_place = IN_PLACE in context.features
    counters = context.counters

    def allocate_slots(manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            pending = manager._kvmend_pending
        except AttributeError:
            pending = _adopt(manager)
        if pending.open_stats is not None:
            return admit_inline(manager, pending, request, args, kwargs)
        held = pending.request
        if held is not request and held is not None and request.num_computed_tokens == 0:
            # Somebody else was looked up between this request's lookup and its admission, by a connector say. No
            # block has changed hands in between, so asking again gives what its own lookup gave.
            manager.get_computed_blocks(request)
            held = pending.request
        pending.request = None
        pending.idle = True
        blocks = original(manager, request, *args, **kwargs)
        # A request that has computed tokens is running, or resumed after an asynchronous load: not an admission
        # that a lookup led to. It can be pending only because somebody probed the cache for it.
        if held is request and held is not None and blocks is not None and request.num_computed_tokens == 0:
            stats = manager.prefix_cache_stats
            if stats is not None and not (in_place and _skips_cache(request)):
                if in_place:
                    stats.requests += pending.requests
                    stats.queries += pending.queries
                    stats.hits += pending.hits
                else:
                    stats.record(*pending.recorded)
                counters.settled += 1
        return blocks

    def admit_inline(manager: Any, pending: _Pending, request: Any, args: Any, kwargs: Any) -> Any:
        ours = pending.open_hashes is request.block_hashes and request.num_computed_tokens == 0
        blocks = original(manager, request, *args, **kwargs)
        # The inline path counts whatever these two say; a lookup that may not read the cache is none.
        if ours and blocks is not None and manager.enable_caching and not request.skip_reading_prefix_cache:
            if _counts_of(pending.open_stats) != pending.open_before:
                counters.held += 1
                counters.settled += 1
            _close(pending)
        else:
            _put_back(pending, counters)
        return blocks

    return _only_if_pending(original, allocate_slots)


def _only_if_pending(original: Callable[..., Any], settling: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the very parameters of `original` that calls `settling` if a lookup is pending.

    Every running request comes through here at every step. A wrapper that takes and passes on `*args, **kwargs`
    costs 300 ns a call, a tenth of what it wraps; one with the parameters spelt out costs 35 ns. Their names differ
    from release to release, so the function is made from the signature, as `dataclasses` makes an `__init__`.
    """
    parameters = list(inspect.signature(original, follow_wrapped=False).parameters.values())
    if any(each.kind is not each.POSITIONAL_OR_KEYWORD for each in parameters):
        # Somebody else's wrapper; it may care which arguments come by name.
        return functools.wraps(original)(settling)
    names = [each.name for each in parameters]
    optional = {f"default_{each.name}": each.default for each in parameters if each.default is not each.empty}
    signature = ", ".join(f"{name}=default_{name}" if f"default_{name}" in optional else name for name in names)
    source = f"""
def allocate_slots({signature}):
    try:
        idle = {names[0]}._kvmend_pending.idle
    except AttributeError:
        idle = False
    if idle:
        return original({", ".join(names)})
    return settling({", ".join(names)})
"""
    scope: dict[str, Any] = {"original": original, "settling": settling, **optional}
    exec(source, scope)
    made: Callable[..., Any] = scope["allocate_slots"]
    return functools.wraps(original)(made)


def link_coordinator(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `KVCacheManager.__init__`: the coordinator learns whose it is, which the inline path never says."""

    @functools.wraps(original)
    def __init__(manager: Any, *args: Any, **kwargs: Any) -> None:
        original(manager, *args, **kwargs)
        _link(manager)

    return __init__


def hold_inline_lookup(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `HybridKVCacheCoordinator.find_longest_cache_hit_per_group(block_hashes, max_length)`."""
    counters = context.counters

    @functools.wraps(original)
    def find_longest_cache_hit_per_group(coordinator: Any, block_hashes: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(coordinator, block_hashes, *args, **kwargs)
        link = getattr(coordinator, _LINK, None)
        manager = link() if link is not None else None
        if manager is not None and manager.prefix_cache_stats is not None:
            pending = getattr(manager, "_kvmend_pending", None) or _adopt(manager)
            if pending.open_stats is not None:
                _put_back(pending, counters)
            pending.request = None
            pending.idle = False
            pending.open_stats = manager.prefix_cache_stats
            pending.open_before = _counts_of(pending.open_stats)
            pending.open_hashes = block_hashes
        return found

    return find_longest_cache_hit_per_group


def drop_inline_lookup(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `KVCacheManager.make_prefix_cache_stats()`: a step's statistics leave without a pending lookup."""
    counters = context.counters

    @functools.wraps(original)
    def make_prefix_cache_stats(manager: Any, *args: Any, **kwargs: Any) -> Any:
        pending = getattr(manager, "_kvmend_pending", None)
        if pending is not None and pending.open_stats is not None:
            _put_back(pending, counters)
        if not hasattr(manager.coordinator, _LINK):
            _link(manager)
        return original(manager, *args, **kwargs)

    return make_prefix_cache_stats


def _link(manager: Any) -> None:
    setattr(manager.coordinator, _LINK, weakref.ref(manager))


_counts_of: Callable[[Any], tuple[int, ...]] = operator.attrgetter(*_COUNTS, *_PREEMPTED)


def _put_back(pending: _Pending, counters: Counters) -> None:
    """Ends an inline lookup that led to no admission: the statistics are again what they were before it."""
    stats = pending.open_stats
    if _counts_of(stats) != pending.open_before:
        for name, value in zip((*_COUNTS, *_PREEMPTED), pending.open_before, strict=True):
            setattr(stats, name, value)
        counters.held += 1
    _close(pending)


def _close(pending: _Pending) -> None:
    pending.open_stats = pending.open_hashes = None
    pending.open_before = ()
    pending.idle = pending.request is None


def _skips_cache(request: Any) -> bool:
    """Prompt log-probabilities need every token computed; 0.8.5 counts such a request though it looks nothing up."""
    return getattr(getattr(request, "sampling_params", None), "prompt_logprobs", None) is not None


def probe(sources: Sources) -> Finding:
    """Reads from the source when lookups are counted.

    Affected: the lookup counts. Fixed: it does not, and `schedule()` calls `record_prefix_cache_stats`.
    """
    lookup = sources.body(_MANAGER, "KVCacheManager.get_computed_blocks")
    admission = sources.body(_MANAGER, "KVCacheManager.allocate_slots")
    schedule = sources.body(_SCHEDULER, "Scheduler.schedule")
    if lookup is None or admission is None or schedule is None:
        missing = "get_computed_blocks" if lookup is None else "allocate_slots" if admission is None else "schedule"
        return Finding(state=UNKNOWN, reason=f"there is no {missing} where vLLM's V1 scheduler keeps it")
    features = set()
    if _increments(lookup):
        features.add(IN_PLACE)
    elif not _calls(lookup, "record"):
        if _calls(schedule, "record_prefix_cache_stats"):
            return Finding(state=FIXED, reason="schedule() records lookups at admission itself")
        return Finding(state=UNKNOWN, reason="neither the lookup nor schedule() counts lookups in a known way")
    if _calls(schedule, "record_prefix_cache_stats"):
        return Finding(state=UNKNOWN, reason="lookups are counted both at the lookup and at admission")
    if _calls(schedule, "find_longest_cache_hit_per_group"):
        features.add(INLINE)
    how = "increments the counters" if IN_PLACE in features else "records"
    where = " and schedule() does so inline for hybrid models with a connector" if INLINE in features else ""
    return Finding(state=AFFECTED, reason=f"the lookup {how} before admission{where}", features=frozenset(features))


def _calls(source: BodySource, method: str) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method
        for node in ast.walk(source.tree)
    )


def _increments(source: BodySource) -> bool:
    return any(
        isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute) and node.target.attr == "queries"
        for node in ast.walk(source.tree)
    )


FIX = Fix(
    id="vllm-prefix-stats",
    switch="KVMEND_VLLM_PREFIX_STATS",
    framework=VLLM,
    summary="Prefix-cache lookups are counted once per admission, not at every scheduling retry.",
    why=WHY,
    how=HOW,
    remove_when=REMOVE_WHEN,
    upstream=(
        "https://github.com/vllm-project/vllm/pull/48860",
        "https://github.com/vllm-project/vllm/issues/43736",
        "https://github.com/vllm-project/vllm/issues/49829",
    ),
    releases="0.8.5 – 0.26.0",
    sites=(
        Site(module=_MANAGER, qualname="KVCacheManager.get_computed_blocks", wrap=hold_lookup),
        Site(module=_MANAGER, qualname="KVCacheManager.allocate_slots", wrap=settle_admission),
        Site(
            module=_MANAGER,
            qualname="KVCacheManager.__init__",
            wrap=link_coordinator,
            features=frozenset({INLINE}),
        ),
        Site(
            module=_MANAGER,
            qualname="KVCacheManager.make_prefix_cache_stats",
            wrap=drop_inline_lookup,
            features=frozenset({INLINE}),
        ),
        Site(
            module=_COORDINATOR,
            qualname="HybridKVCacheCoordinator.find_longest_cache_hit_per_group",
            wrap=hold_inline_lookup,
            features=frozenset({INLINE}),
        ),
    ),
    bodies=(
        Body(module=_MANAGER, qualname="KVCacheManager.record_prefix_cache_stats"),
        Body(module=_MANAGER, qualname="KVCacheManager.reset_prefix_cache"),
        Body(module=_SCHEDULER, qualname="Scheduler.schedule"),
        Body(module=_STATS, qualname="PrefixCacheStats"),
    ),
    probe=probe,
    counters={
        "held": "lookups held back",
        "settled": "lookups counted at admission",
        "dropped": "lookups that led to no admission",
    },
    fingerprints="kvmend_fixes.fingerprints:vllm-prefix-stats.json",
    proof="kvmend_fixes.proofs.vllm_prefix_stats",
    demo="kvmend_fixes.demos.vllm_prefix_stats",
)
