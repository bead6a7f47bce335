"""Lookups that `Scheduler.schedule()` makes itself, past the manager's: hybrid models with a connector, 0.24 - 0.26.

The coordinator is told neither which request nor which manager it is asked for. So it learns whose it is when a manager
is made, and the request is known by its list of block hashes.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

from kvmend.api import Context, Counters
from kvmend_fixes.vllm._settling import Counted

_COUNTS = ("requests", "queries", "hits")
_EVERY = (*_COUNTS, *(f"preempted_{name}" for name in _COUNTS))
_counts_of: Callable[[Any], tuple[int, ...]] = operator.attrgetter(*_EVERY)

#: Whose a coordinator is. Beside the objects, not on them: they can still be pickled and copied.
_managers: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


class Inline:
    """The last inline lookup of a manager, until an admission settles it or something else drops it.

    Attributes:
        hashes: The request's block hashes, the object itself.
        lookup: What it counted, once that is known.
        open_stats: While it counts, the statistics that it counts into.
        open_before: Their values before it.
    """

    __slots__ = ("_counters", "hashes", "lookup", "open_before", "open_stats")

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.hashes: Any = None
        self.lookup: Counted | None = None
        self.open_stats: Any = None
        self.open_before: tuple[int, ...] = ()

    def open(self, stats: Any, hashes: Any) -> None:
        """A lookup has been made, and will be counted into the statistics next."""
        self.drop()
        self.hashes, self.open_stats, self.open_before = hashes, stats, _counts_of(stats)

    def drop(self) -> None:
        """No admission came of it: the statistics are what they were before."""
        self._hold()
        self.hashes = self.lookup = None

    def take(self, request: Any, lookup: Any, reads: bool) -> Any:
        """What an admission settles.

        Args:
            request: The request that is given slots.
            lookup: Its pending lookup through the manager, if there is one.
            reads: Whether it reads the cache at all; the inline way counts also what does not, and that is no lookup.
        """
        if self.hashes is None:
            return lookup
        self._hold()
        if self.hashes is request.block_hashes and reads:
            lookup = self.lookup
        self.drop()
        return lookup

    def _hold(self) -> None:
        stats, before = self.open_stats, self.open_before
        if stats is None:
            return
        now = _counts_of(stats)
        if now != before:
            for name, value in zip(_EVERY, before, strict=True):
                setattr(stats, name, value)
            counted = [new - old for new, old in zip(now, before, strict=True)]
            preempted = counted[0] == 0
            _, num_tokens, num_hits = counted[3:] if preempted else counted[:3]
            self.lookup = Counted()
            self.lookup.record(num_tokens, num_hits, preempted)
            self._counters.held += 1
        self.open_stats, self.open_before = None, ()


def may_be_looked_up_inline(manager: Any) -> bool:
    """Whether a manager's coordinator is of the kind that a scheduler can ask past the manager."""
    return hasattr(type(manager.coordinator), "find_longest_cache_hit_per_group")


def is_looked_up_inline(manager: Any) -> bool:
    """Whether vLLM's own `schedule()` does so, if there is a connector: for models with Mamba layers."""
    mamba = getattr(getattr(manager, "kv_cache_config", None), "has_mamba_layers", True)
    return may_be_looked_up_inline(manager) and bool(mamba)


def link(manager: Any, counters: Counters) -> None:
    """Tells a coordinator whose it is."""
    _managers[manager.coordinator] = weakref.ref(manager)
    manager._kvmend_inline = Inline(counters)


def hold_inline_lookup(original: Callable[..., Any], _context: Context) -> Callable[..., Any]:
    """Wrapper of `HybridKVCacheCoordinator.find_longest_cache_hit_per_group(block_hashes, max_length)`."""

    @functools.wraps(original)
    def find_longest_cache_hit_per_group(coordinator: Any, block_hashes: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(coordinator, block_hashes, *args, **kwargs)
        reference = _managers.get(coordinator)
        manager = reference() if reference is not None else None
        if manager is not None and manager.prefix_cache_stats is not None:
            manager._kvmend_inline.open(manager.prefix_cache_stats, block_hashes)
        return found

    return find_longest_cache_hit_per_group
