"""How vllm-prefix-stats settles what lookups left pending: at the end of a step, or one admission at a time."""

from __future__ import annotations

import functools
import weakref
from types import MethodType, SimpleNamespace
from typing import Any

from kvmend.api import Context, Counters
from kvmend_fixes.vllm._own_loops import helped_by


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

    By the time they are settled a request may be longer than it was, so that all is kept that the lookup would have
    recorded. The manager's next step is told to look here first.
    """

    def __init__(self, manager: Any, counters: Any) -> None:
        super().__init__()
        self._counters = counters
        self.manager = weakref.ref(manager) if manager is not None else _nobody
        self.used = False

    def __setitem__(self, request: Any, lookup: Any) -> None:
        if not isinstance(lookup, Counted):
            found, lookup = lookup, Counted()
            lookup.record(request.num_tokens, found, request.num_preemptions > 0)
        super().__setitem__(request, lookup)
        self._counters.held += 1
        self.used = True
        manager = self.manager()
        if manager is not None:
            manager._kvmend_carries = None

    # A manager that is copied or sent elsewhere has no lookup pending there.
    def __reduce__(self) -> tuple[Any, ...]:
        return _elsewhere, ()

    def __deepcopy__(self, _: Any) -> Pending:
        return Pending(None, self._counters)


def _elsewhere() -> Pending:
    return Pending(None, SimpleNamespace(held=0))


def _nobody() -> None:
    """In the place of a reference to a manager."""


def adopt(manager: Any, context: Context, *, by_steps: bool) -> None:
    """Prepares a manager.

    Its `_kvmend_pending` has lookups that no step's end settles. While a step runs, `_kvmend_step` is True if each
    request carries its lookup, as `_kvmend_lookup`, and the scheduler if lookups count at once, for which see
    `_whole_steps`; else it is None. `_kvmend_last` is whose was the step's last lookup. `_kvmend_carries` says whether
    requests carry their lookups in the next step; it is None if that is not known, or something is pending.

    Args:
        manager: The manager.
        context: That of the application.
        by_steps: Whether all its admissions are made in steps whose end settles them. If not, it gets an
            `allocate_slots` that settles the request's lookup, in whatever loop it is called.
    """
    manager._kvmend_by_steps = by_steps
    manager._kvmend_pending = Pending(manager, context.counters)
    manager._kvmend_carries = manager._kvmend_step = manager._kvmend_last = manager._kvmend_opened = None
    methods = {} if by_steps else {"allocate_slots": _settling_allocate_slots(manager, context.counters)}
    helped_by(context).give(manager, methods)


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


def settle_outside(manager: Any, pending: Pending, counters: Counters, loading: Any) -> None:
    """Counts what was looked up in no step, for requests that have been admitted since.

    A pending lookup is of a request that waited and had no tokens computed. If it has some now, it was admitted; so it
    was if its KV is being loaded, which up to 0.18 does not show in its tokens.

    Args:
        manager: The manager.
        pending: The lookups by request; none are left.
        counters: Those of the fix.
        loading: The status of a request whose KV is loaded asynchronously.
    """
    stats = manager.prefix_cache_stats
    for request, lookup in list(pending.items()) if stats is not None else ():
        if request.num_computed_tokens or request.status is loading:
            count(stats, request, lookup)
            counters.settled += 1
    pending.clear()
    pending.used = False


def settle_load(manager: Any, request: Any, counters: Counters) -> None:
    """Counts the lookup of a request whose KV is being loaded: an admission, after which it does not run yet."""
    lookup, request._kvmend_lookup = request._kvmend_lookup, None
    if lookup is not None and manager.prefix_cache_stats is not None:
        count(manager.prefix_cache_stats, request, lookup)
        counters.settled += 1


def settle_admitted(running: Any, last: Any, stats: Any, counters: Counters, plain: Any) -> None:
    """Counts the lookups of the requests that a step has admitted.

    Args:
        running: The scheduler's running requests; those admitted last are at the end.
        last: The last of them before the step, or None.
        stats: The manager's statistics; without them nothing is counted.
        counters: Those of the fix.
        plain: Where of every lookup only the tokens found are known, and the rest follows from the request: the
            statistics' own `record`. Where it is another one, each lookup is recorded by it.
    """
    add_up = plain is not None and getattr(type(stats), "record", None) is plain
    requests = queries = hits = 0
    others = []
    for request in reversed(running):
        try:  # nearly all have it, and so this is cheaper than `getattr`
            lookup = request._kvmend_lookup
        except AttributeError:
            lookup = None
        if lookup is None:  # it was not looked up, or is counted already
            if request is last:
                break
            continue
        request._kvmend_lookup = None
        if add_up and not request.num_preemptions:
            # A call of `record` each would take 1,000 instructions, half a per cent of an admission.
            requests += 1
            queries += request.num_tokens
            hits += lookup
        elif stats is not None:
            others.append((request, lookup))
    for request, lookup in reversed(others):
        count(stats, request, lookup)
        counters.settled += 1
    if requests:
        stats.requests += requests
        stats.queries += queries
        stats.hits += hits
        counters.settled += requests
