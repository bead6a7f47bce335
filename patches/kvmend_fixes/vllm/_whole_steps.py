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
_NOBODY = SimpleNamespace(num_computed_tokens=1, skip_reading_prefix_cache=True)

#: Statistics at the first lookup of a step, None if they have been handed out since, and their values before it.
Opened = tuple[Any, tuple[int, ...]]


def goes_on(scheduler: Any) -> bool:
    """Whether a scheduler's loop may go on after a lookup that led to nothing.

    It does with a connector, for KV or for what encoders made; what has no such attribute is not known. Without chunked
    prefill 0.11.1 and 0.11.2 pass over a prompt that is longer than what is left of the step's budget.
    """
    if (getattr(scheduler, "connector", scheduler) or getattr(scheduler, "ec_connector", None)) is not None:
        return True
    config = getattr(scheduler, "scheduler_config", None)
    return not all(getattr(config, name, True) for name in ("enable_chunked_prefill", "chunked_prefill_enabled"))


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
    counted = stats.requests or stats.preempted_requests
    manager._kvmend_opened = stats, _counts_of(stats) if counted else _NONE
    manager._kvmend_last = _NOBODY
    return True


def report_in_step(manager: Any, counters: Counters) -> None:
    """The statistics are about to be handed out in the middle of a step, whose admissions count when it ends."""
    opened, manager._kvmend_opened = manager._kvmend_opened, (None, _NONE)
    _take_all_back(opened, counters)


def abandon_step(manager: Any, counters: Counters) -> None:
    """A step has raised: nothing of it counts, but what requests carry and are admitted for in a later one."""
    opened, manager._kvmend_opened = manager._kvmend_opened, None
    manager._kvmend_carried = manager._kvmend_last = None
    if opened is not None:
        _take_all_back(opened, counters)


def close_step(manager: Any, looked_up: Any, running: Any, last: Any, before: int, output: Any, counters: Any) -> None:
    """Takes back what led to no admission in a step that has ended.

    Args:
        manager: The manager.
        looked_up: Whose lookup was the step's last.
        running: The scheduler's running requests; those admitted last are at the end.
        last: The last of them before the step, or None.
        before: How many of them there were before the step.
        output: What the step scheduled.
        counters: Those of the fix.
    """
    opened, manager._kvmend_opened = manager._kvmend_opened, None
    stats, counts = opened
    if stats is None or stats is not manager.prefix_cache_stats:
        _recount(manager, opened, _after(last, running), output, counters)
        return
    made = stats.requests + stats.preempted_requests
    if counts is not _NONE:
        made -= counts[0] + counts[3]
    # Who was admitted has tokens computed when the step ends.
    waits = made and not looked_up.num_computed_tokens and not looked_up.skip_reading_prefix_cache
    settled = made - 1 if waits else made
    if settled != len(running) - before:
        admitted = _after(last, running)
        # Fewer is well: sessions run again without a lookup.
        if settled > sum(not request.skip_reading_prefix_cache for request in admitted):
            _recount(manager, opened, admitted, output, counters)
            return
    counters.held += made
    counters.settled += settled
    if waits:
        _take_back(stats, looked_up, manager._kvmend_hits)


def _after(last: Any, running: Any) -> list[Any]:
    """The running requests after one, or all."""
    return list(takewhile(lambda request: request is not last, reversed(running)))[::-1]


def _take_all_back(opened: Opened, counters: Counters) -> None:
    stats, before = opened
    if stats is not None:
        counters.held += stats.requests - before[0] + stats.preempted_requests - before[3]
        for name, value in zip(_COUNTS, before, strict=True):
            setattr(stats, name, value)


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
    scheduled = getattr(output, "num_scheduled_tokens", {})
    for request in admitted:
        if not request.skip_reading_prefix_cache:
            hits = request.num_computed_tokens - scheduled.get(request.request_id, 0)
            stats.record(request.num_tokens, hits, request.num_preemptions > 0)
            counters.settled += 1
