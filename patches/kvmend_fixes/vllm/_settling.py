"""How vllm-prefix-stats settles what lookups left pending: at the end of a step, or one admission at a time."""

from __future__ import annotations

import functools
import weakref
from types import MethodType
from typing import Any

from kvmend.api import Counters
from kvmend_fixes.vllm._own_loops import Helped


class Counted:
    """What a lookup counted, and the stand-in for the manager's statistics object while it runs.

    `record` and the three plain counters are what the two generations of the original use.
    """

    __slots__ = ("hits", "preempted", "queries", "records", "requests")

    def __init__(self) -> None:
        self.requests = self.queries = self.hits = 0
        self.preempted = self.records = False

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Same call as `PrefixCacheStats.record`: tokens looked up, tokens found, resumed after a preemption."""
        self.requests, self.queries, self.hits = 1, num_tokens, num_hits
        self.preempted, self.records = preempted, True


class Pending(weakref.WeakKeyDictionary[Any, Any]):
    """Lookups that no step's end settles, by request: each request's newest, as long as there is the request.

    They are counted as dropped from the beginning, and no more once they are settled. By then a request may be longer
    than it was, so that all is kept that the lookup would have recorded.
    """

    def __init__(self, counters: Counters) -> None:
        super().__init__()
        self._counters = counters

    def __setitem__(self, request: Any, lookup: Any) -> None:
        if not isinstance(lookup, Counted):
            found, lookup = lookup, Counted()
            lookup.record(request.num_tokens, found, request.num_preemptions > 0)
        super().__setitem__(request, lookup)
        self._counters.dropped += 1

    # A manager that is copied or sent elsewhere has no lookup pending there.
    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()

    def __deepcopy__(self, _: Any) -> Any:
        return {}


def adopt(manager: Any, helped: Helped, counters: Counters, *, by_steps: bool) -> None:
    """Prepares a manager.

    Its `_kvmend_pending` has the lookups of requests that wait for admission. While a step runs whose end settles them
    that is a plain dictionary; it is gone with the step.

    Args:
        manager: The manager.
        helped: Who takes back what the manager gets.
        counters: Those of the fix.
        by_steps: Whether all its admissions are made in steps whose end settles them. If not, it gets an
            `allocate_slots` that settles the request's lookup, in whatever loop it is called.
    """
    manager._kvmend_by_steps = by_steps
    manager._kvmend_pending = Pending(counters)
    helped.give(manager, {} if by_steps else {"allocate_slots": _settling_allocate_slots(manager, counters)})


def _settling_allocate_slots(manager: Any, counters: Counters) -> MethodType:
    """It calls the one that the class has at the time of the call, so that other plugins' wrappers keep working."""

    def take(manager: Any, request: Any) -> Any:
        """What is to be settled if the request gets its slots; it is pending no more."""
        lookup = manager._kvmend_pending.pop(request, None)
        inline = getattr(manager, "_kvmend_inline", None)
        if inline is None:
            return lookup
        return inline.take(request, lookup, manager.enable_caching and not request.skip_reading_prefix_cache)

    @functools.wraps(type(manager).allocate_slots)
    def allocate_slots(manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        lookup = None
        # Before the call: somebody else's wrapper may look up beneath. Their request may be of a kind of their own.
        try:
            if not request.num_computed_tokens:
                lookup = take(manager, request)
        except (AttributeError, TypeError):
            pass
        blocks = type(manager).allocate_slots(manager, request, *args, **kwargs)
        stats = manager.prefix_cache_stats
        if lookup is not None and blocks is not None and stats is not None:
            counters.dropped -= 1
            count(stats, request, lookup)
            counters.settled += 1
        return blocks

    # Bound, so that a copy of the manager gets one of its own.
    return MethodType(allocate_slots, manager)


def count(stats: Any, request: Any, lookup: Any) -> None:
    """Counts a lookup as the original would have.

    Args:
        stats: The manager's statistics.
        request: The request, as it was at the lookup.
        lookup: What is known of it: a `Counted`, or the tokens found, where the rest follows from the request.
    """
    if not isinstance(lookup, Counted):
        stats.record(request.num_tokens, lookup, request.num_preemptions > 0)
    elif lookup.records:
        stats.record(lookup.queries, lookup.hits, lookup.preempted)
    else:
        stats.requests += 1
        stats.queries += lookup.queries
        stats.hits += lookup.hits


def plain_record(statistics: Any) -> Any:
    """The method of a statistics class that records, if it is the class's own and nobody's wrapper; else None."""
    record = getattr(statistics, "record", None)
    own = getattr(record, "__module__", None) == statistics.__module__ and not hasattr(record, "__wrapped__")
    return record if own else None


def settle(pending: Any, stats: Any, loading: Any, plain: Any = None) -> int:
    """Counts the pending lookups of requests that have been admitted since.

    A pending lookup is of a request that waited and had no tokens computed. If it has some now, it was admitted; so it
    was if its KV is being loaded, which up to 0.18 does not show in its tokens.

    Args:
        pending: The lookups by request.
        stats: The manager's statistics; without them nothing is counted.
        loading: The status of a request whose KV is loaded asynchronously.
        plain: Where of every lookup only the tokens found are known, and the rest follows from the request: the
            statistics' own `record`. Where it is another one, each lookup is recorded by it.

    Returns:
        How many there were.
    """
    if stats is None:
        return 0
    if plain is not None and type(stats).record is plain:
        return _settle_returned(pending, stats, loading)
    settled = 0
    for request, lookup in pending.items():
        if request.num_computed_tokens or request.status is loading:
            count(stats, request, lookup)
            settled += 1
    return settled


def _settle_returned(pending: dict[Any, int], stats: Any, loading: Any) -> int:
    """The same, added up: a call of `record` each would take 1,000 instructions, half a per cent of an admission."""
    requests = queries = hits = preempted = 0
    for request, found in pending.items():
        if request.num_computed_tokens or request.status is loading:
            if request.num_preemptions:
                stats.record(request.num_tokens, found, True)
                preempted += 1
            else:
                requests += 1
                queries += request.num_tokens
                hits += found
    if requests:
        stats.requests += requests
        stats.queries += queries
        stats.hits += hits
    return requests + preempted
