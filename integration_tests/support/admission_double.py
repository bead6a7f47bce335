"""A small cache manager of our own with the seams that vLLM's has since 0.27, and schedulers that make one.

What stands for vLLM's own scheduler is in a module named as in vLLM, since a fix may ask whose code it looks at.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvmend.api import Context, Counters
from kvmend_fixes.vllm.copied_scheduler import FIX
from support.manager_double import Stats, as_upstreams


def make_manager_class(*, caching: bool = True, stats: bool = True) -> Any:
    """A manager class that counts only when told to, with nothing over its methods yet."""

    class KVCacheManager:
        def __init__(self) -> None:
            self.prefix_cache_stats: Stats | None = Stats() if stats else None
            self.found: Any = 60
            self.arity = 3
            self.full = False

        def prefix_cache_lookup_enabled(self, request: Any) -> bool:
            return caching and not request.skip_reading_prefix_cache

        def get_computed_blocks(self, request: Any, limit: int | None = None) -> Any:
            return ("blocks", self.found, 0, "more")[: self.arity]

        def get_computed_blocks_for_connector(self, request: Any) -> Any:
            return "blocks per group", self.found, 0, True

        def allocate_slots(
            self, request: Any, num_new_tokens: int, num_new_computed_tokens: int = 0, blocks: Any = None
        ) -> Any:
            return None if self.full else (request, num_new_tokens, num_new_computed_tokens, blocks)

        def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
            if self.prefix_cache_stats is not None and self.prefix_cache_lookup_enabled(request):
                self.prefix_cache_stats.record(request.num_tokens, num_hits, request.num_preemptions > 0)

    return KVCacheManager


_UPSTREAM = '''
class Scheduler:
    """Counts at the admission."""

    def __init__(self, manager_class):
        self.kv_cache_manager = manager_class()

    def update_from_output(self, output):
        return output

    def schedule(self, *requests):
        admitted = []
        for request in requests:
            found = self.kv_cache_manager.get_computed_blocks(request)
            if self.kv_cache_manager.allocate_slots(request, 1, found[1], found[0]) is not None:
                self.kv_cache_manager.record_prefix_cache_stats(request, found[1])
                request.run()
                admitted.append(request)
        return admitted
'''


def make_upstream_scheduler() -> Any:
    """A scheduler class that is vLLM's own as far as its module's name says."""
    return as_upstreams(_UPSTREAM)


class OwnLoop:
    """A scheduler of somebody's own, no subclass of anything; it counts nothing."""

    def __init__(self, manager_class: Any) -> None:
        self.kv_cache_manager = manager_class()

    def update_from_output(self, output: Any) -> Any:
        return output

    def schedule(self, *requests: Any) -> list[Any]:
        admitted = []
        for request in requests:
            found = self.kv_cache_manager.get_computed_blocks(request)
            if self.kv_cache_manager.allocate_slots(request, 1, found[1], found[0]) is not None:
                request.run()
                admitted.append(request)
        return admitted


@dataclass
class Rig:
    """A scheduler whose manager was made with the fix in place."""

    scheduler: Any
    context: Context

    @property
    def manager(self) -> Any:
        return self.scheduler.kv_cache_manager

    @property
    def untouched(self) -> bool:
        """Whether the manager has nothing beside what its constructor gave it."""
        return not any(callable(value) for value in vars(self.manager).values())

    @property
    def counts(self) -> tuple[int, int, int]:
        found: tuple[int, int, int] = self.manager.prefix_cache_stats.counts
        return found

    @property
    def preempted(self) -> tuple[int, int, int]:
        found: tuple[int, int, int] = self.manager.prefix_cache_stats.preempted
        return found

    @property
    def counted(self) -> dict[str, int]:
        counted: dict[str, int] = self.context.counters.as_dict()
        return counted


def make_rig(scheduler_class: Callable[[Any], Any] = OwnLoop, **options: Any) -> Rig:
    """A scheduler of a class, with the fix over the manager class that it gets.

    Args:
        scheduler_class: Called with the manager class.
        options: `caching` and `stats` of the manager.
    """
    manager_class = make_manager_class(**options)
    context = Context(
        mode="1",
        features=frozenset(),
        facts={},
        counters=Counters(FIX.counters, FIX.may_fall),
        log=logging.getLogger("vllm.kvmend"),
    )
    (site,) = FIX.sites
    manager_class.__init__ = site.wrap(manager_class.__init__, context)
    assert sys.modules.get("vllm") is None
    return Rig(scheduler=scheduler_class(manager_class), context=context)
