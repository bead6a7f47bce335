"""Steps without a KV connector: lookups count as vLLM counts them, and what led to no admission is taken back.

There a lookup that leads to no admission ends the scheduling loop, so that it is the step's last. Nothing is done for
each request, but for remembering which was the last. Where a step shows that it was otherwise, because somebody's code
looked requests up in the middle of it, everything is taken back, and each admission is counted by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

from kvmend.api import Counters

_COUNTS = ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")
_NONE = (0,) * len(_COUNTS)
_counts_of: Callable[[Any], tuple[int, ...]] = operator.attrgetter(*_COUNTS)
#: In the place of the last request when none has been looked up in a step yet.
_NOBODY = SimpleNamespace(skip_reading_prefix_cache=True)

#: Statistics at the first lookup of a step, None if they have been handed out since, and their values before it.
Opened = tuple[Any, tuple[int, ...]]


def goes_on(scheduler: Any) -> bool:
    """Whether a scheduler's loop goes on after a lookup that led to nothing.

    It does with a connector, for KV or for what encoders made; what has no such attribute is not known.
    """
    return (getattr(scheduler, "connector", scheduler) or getattr(scheduler, "ec_connector", None)) is not None


def open_step(manager: Any, plain: Any) -> bool:
    """The first lookup of a step is about to be made; whether it and the others may count at once.

    Args:
        manager: The manager.
        plain: The statistics' own `record`; another one would see lookups that do not count.
    """
    stats = manager.prefix_cache_stats
    if getattr(type(stats), "record", None) is not plain:
        manager._kvmend_carried = True
        return False
    manager._kvmend_opened = stats, _counts_of(stats)
    manager._kvmend_last = _NOBODY
    return True


def report_in_step(manager: Any, counters: Counters) -> None:
    """The statistics are about to be handed out in the middle of a step, whose admissions count when it ends."""
    opened, manager._kvmend_opened = manager._kvmend_opened, (None, _NONE)
    _take_all_back(opened, counters)


def abandon_step(manager: Any, counters: Counters) -> None:
    """A step has raised: nothing of it counts."""
    opened, manager._kvmend_opened = manager._kvmend_opened, None
    manager._kvmend_carried = manager._kvmend_last = None
    if opened is not None:
        _take_all_back(opened, counters)


def close_step(manager: Any, looked_up: Any, running: Any, last: Any, output: Any, counters: Counters) -> None:
    """Takes back what led to no admission in a step that has ended.

    Args:
        manager: The manager.
        looked_up: Whose lookup was the step's last.
        running: The scheduler's running requests; those admitted last are at the end.
        last: The last of them before the step, or None.
        output: What the step scheduled.
        counters: Those of the fix.
    """
    opened, manager._kvmend_opened = manager._kvmend_opened, None
    stats, before = opened
    if stats is None or stats is not manager.prefix_cache_stats:
        _recount(manager, opened, _after(last, running), output, counters)
        return
    made = stats.requests - before[0] + stats.preempted_requests - before[3]
    pending = not (running and running[-1] is looked_up) and not looked_up.skip_reading_prefix_cache and made > 0
    settled = made - pending
    place = len(running) - settled - 1
    if not (running[place] is last if place >= 0 else place == -1 and last is None):
        # Fewer than were admitted is well: some run again without a lookup.
        admitted = _after(last, running)
        if settled > len(admitted):
            _recount(manager, opened, admitted, output, counters)
            return
    counters.held += made
    counters.settled += settled
    if pending:
        _take_back(stats, looked_up, manager._kvmend_hits)


def _take_all_back(opened: Opened, counters: Counters) -> None:
    stats, before = opened
    if stats is not None:
        counters.held += stats.requests - before[0] + stats.preempted_requests - before[3]
        for name, value in zip(_COUNTS, before, strict=True):
            setattr(stats, name, value)


def _after(last: Any, running: Any) -> list[Any]:
    """The running requests after one, or all."""
    return list(takewhile(lambda request: request is not last, reversed(running)))[::-1]


def _take_back(stats: Any, request: Any, hits: int) -> None:
    if request.num_preemptions > 0:
        stats.preempted_requests -= 1
        stats.preempted_queries -= request.num_tokens
        stats.preempted_hits -= hits
    else:
        stats.requests -= 1
        stats.queries -= request.num_tokens
        stats.hits -= hits


def _recount(manager: Any, opened: Opened, admitted: list[Any], output: Any, counters: Counters) -> None:
    """Counts each admission, from what was computed of it before its step, and nothing else."""
    _take_all_back(opened, counters)
    stats = manager.prefix_cache_stats
    if stats is None:
        return
    if stats is not opened[0]:  # these are new
        _take_all_back((stats, _NONE), counters)
    for request in admitted:
        if not request.skip_reading_prefix_cache:
            hits = request.num_computed_tokens - output.num_scheduled_tokens.get(request.request_id, 0)
            stats.record(request.num_tokens, hits, request.num_preemptions > 0)
            counters.settled += 1
