"""What vllm-prefix-stats remembers of a manager's lookups until an admission settles them."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

from kvmend.api import Counters

COUNTS = ("requests", "queries", "hits")
_PREEMPTED = tuple(f"preempted_{name}" for name in COUNTS)

#: Lookups that a manager remembers. A request is admitted right after its own; what comes between are probes, or those
#: that a scheduler of one's own makes in a batch. Of 7, a step with 1,000 deferred requests would take half a per cent
#: less, because the place that is used next is still in the processor's cache.
KEPT = 31

#: Whose a lookup is that has not been used yet.
_NEVER = object()


class Lookup:
    """One lookup that is held back, and the stand-in for the manager's statistics object while it runs.

    `record` and the three plain counters are what the two generations of the original use.
    """

    __slots__ = (
        "before",
        "hits",
        "keeper",
        "last",
        "next",
        "num_hits",
        "num_tokens",
        "place",
        "preempted",
        "queries",
        "request_id",
        "requests",
    )

    def __init__(self, keeper: Keeper, place: int) -> None:
        self.keeper, self.place, self.last = keeper, place, place == KEPT
        self.before = self.next = self
        self.request_id: Any = _NEVER
        self.num_tokens = self.num_hits = self.requests = self.queries = self.hits = 0
        self.preempted = False

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Same call as `PrefixCacheStats.record`: tokens looked up, tokens found, resumed after a preemption."""
        self.num_tokens = num_tokens
        self.num_hits = num_hits
        self.preempted = preempted
        keeper = self.keeper
        keeper.free = self.next
        # Asked at each, because a last lookup of a class of its own would cost more: the call in the original would
        # meet two classes, and CPython specialises it for one.
        if self.last:
            keeper.rounds += 1


class Keeper:
    """What a manager's lookups leave open.

    Plain lookups: a ring of `KEPT` and one more, `free`, which is written next; `free.before` was written last.
    Nothing is made and nothing is counted at a lookup, because either would cost more than the rest of the wrapper.
    A newest lookup that an admission takes gives its place back, so that the next one is written where the processor's
    cache still has it.
    Inline lookups: `inline_hashes` the request's block hashes, which name the request because the coordinator is not
    told which one it is; while it counts, `open_stats` the statistics it counts into and `open_before` their values
    before; and then `inline_lookup`, what it counted.
    """

    __slots__ = (
        "__weakref__",
        "counters",
        "free",
        "inline_hashes",
        "inline_lookup",
        "open_before",
        "open_stats",
        "rounds",
    )

    def __init__(self, counters: Counters) -> None:
        self.counters, self.rounds = counters, 0
        lookups = [Lookup(self, place) for place in range(KEPT + 1)]
        for place, lookup in enumerate(lookups):
            lookup.before, lookups[place - 1].next = lookups[place - 1], lookup
        self.free = lookups[0]
        # Nobody's, on the way back only: what was written last in a round is looked for, but gives no place back,
        # so that rounds only grow.
        fence = Lookup(self, place=0)
        fence.request_id, fence.before, self.free.before = None, self.free.before, fence
        self.open_stats: Any = None
        self.open_before: tuple[int, ...] = ()
        self.inline_hashes: Any = None
        self.inline_lookup: Lookup | None = None

    def left(self) -> int:
        """Plain lookups so far that have not given their place back."""
        return self.rounds * (KEPT + 1) + self.free.place

    def take(self, request: Any) -> Lookup | None:
        """The request's last lookup, which is pending no more, though its place is still counted."""
        request_id, lookup = request.request_id, self.free.before
        while lookup.request_id != request_id:
            lookup = lookup.before
            if lookup is self.free or lookup.request_id is _NEVER:
                return None
        lookup.request_id = None
        return lookup

    def __del__(self) -> None:
        self.counters.dropped += self.left()

    def __reduce__(self) -> tuple[Any, ...]:
        # A manager that is copied or sent elsewhere has no lookup pending there.
        return _nothing, ()


def _nothing() -> None:
    return None


#: The keepers of all managers that are alive; a tuple, because reports are made on another thread.
_keepers: tuple[weakref.ref[Keeper], ...] = ()


def adopt(manager: Any, counters: Counters) -> Keeper:
    """Gives a manager its keeper."""
    global _keepers
    keeper = manager._kvmend_keeper = Keeper(counters)
    _keepers = (*(each for each in _keepers if each() is not None), weakref.ref(keeper))
    return keeper


def keeper_of(manager: Any, counters: Counters) -> Keeper:
    """The manager's keeper; one that was made before the fix came, or copied, gets its own here."""
    return getattr(manager, "_kvmend_keeper", None) or adopt(manager, counters)


def dropped(counters: Counters) -> int:
    """Lookups not settled: those in the rings of managers that are alive, and what `counters.dropped` adds to them."""
    keepers = [each() for each in _keepers]
    return counters.dropped + sum(each.left() for each in keepers if each is not None and each.counters is counters)


counts_of: Callable[[Any], tuple[int, ...]] = operator.attrgetter(*COUNTS, *_PREEMPTED)


def hold_inline(keeper: Keeper) -> None:
    """Takes what an inline lookup counted, if one is open, out of the statistics: they are what they were before it."""
    stats, before = keeper.open_stats, keeper.open_before
    if stats is None:
        return
    now = counts_of(stats)
    if now != before:
        for name, value in zip((*COUNTS, *_PREEMPTED), before, strict=True):
            setattr(stats, name, value)
        counted = [new - old for new, old in zip(now, before, strict=True)]
        lookup = keeper.inline_lookup = Lookup(keeper, 0)
        lookup.preempted = counted[0] == 0
        _, lookup.num_tokens, lookup.num_hits = counted[3:] if lookup.preempted else counted[:3]
        keeper.counters.dropped += 1
    keeper.open_stats, keeper.open_before = None, ()


def drop_inline(keeper: Keeper) -> None:
    keeper.inline_hashes = keeper.inline_lookup = None
