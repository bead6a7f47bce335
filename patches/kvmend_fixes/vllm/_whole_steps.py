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


def goes_on(scheduler: Any) -> bool:
    """Whether a scheduler's loop may go on after a lookup that led to nothing.

    It does with a connector, for KV or for what encoders made; what has no such attribute is not known. Without chunked
    prefill 0.11.1 and 0.11.2 pass over a prompt that is longer than what is left of the step's budget.
    """
    if (getattr(scheduler, "connector", scheduler) or getattr(scheduler, "ec_connector", None)) is not None:
        return True
    config = getattr(scheduler, "scheduler_config", None)
    return not all(getattr(config, name, True) for name in ("enable_chunked_prefill", "chunked_prefill_enabled"))


def open_step(manager: Any, scheduler: Any, plain: Any) -> bool:
    """The first lookup of a step is about to be made; whether it and the others may count at once.

    Nothing has been admitted yet, and steps without a lookup, which are most, need not look at what is running. The
    manager's `_kvmend_opened` is the statistics, None once they have been handed out, and their values before the
    lookup; then how many requests are running, and the last of them or None.

    Args:
        manager: The manager.
        scheduler: Whose step it is.
        plain: The statistics' own `record`; another one would see lookups that do not count.
    """
    stats = manager.prefix_cache_stats
    # A connector may have come since the step before.
    if scheduler.connector is not None or getattr(type(stats), "record", None) is not plain:
        manager._kvmend_step = True
        return False
    counted = stats.requests or stats.preempted_requests
    running = scheduler.running
    last = running[-1] if running else None
    manager._kvmend_opened = stats, _counts_of(stats) if counted else _NONE, len(running), last
    manager._kvmend_last = _NOBODY
    return True


def report_in_step(manager: Any, counters: Counters) -> None:
    """The statistics are about to be handed out in the middle of a step, whose admissions count when it ends."""
    stats, before, running, last = manager._kvmend_opened
    manager._kvmend_opened = None, _NONE, running, last
    _take_all_back(stats, before, counters)


def abandon_step(manager: Any, counters: Counters) -> None:
    """A step has raised: nothing of it counts, but what requests carry and are admitted for in a later one."""
    opened, manager._kvmend_opened = manager._kvmend_opened, None
    manager._kvmend_step = manager._kvmend_last = None
    if opened is not None:
        _take_all_back(opened[0], opened[1], counters)


def close_step(manager: Any, looked_up: Any, running: Any, output: Any, counters: Any) -> None:
    """Takes back what led to no admission in a step that has ended.

    Args:
        manager: The manager.
        looked_up: Whose lookup was the step's last.
        running: The scheduler's running requests; those admitted last are at the end.
        output: What the step scheduled.
        counters: Those of the fix.
    """
    stats, counts, before, last = manager._kvmend_opened
    manager._kvmend_opened = manager._kvmend_last = None
    if stats is None or stats is not manager.prefix_cache_stats:
        _recount(manager, stats, counts, _after(last, running), output, counters)
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
            _recount(manager, stats, counts, admitted, output, counters)
            return
    counters.held += made
    counters.settled += settled
    if waits:
        _take_back(stats, looked_up, manager._kvmend_hits)


def _after(last: Any, running: Any) -> list[Any]:
    """The running requests after one, or all."""
    return list(takewhile(lambda request: request is not last, reversed(running)))[::-1]


def _take_all_back(stats: Any, before: tuple[int, ...], counters: Counters) -> None:
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


def _recount(
    manager: Any, opened: Any, before: tuple[int, ...], admitted: list[Any], output: Any, counters: Counters
) -> None:
    """Counts each admission, from what was computed of it before its step, and nothing else."""
    _take_all_back(opened, before, counters)
    stats = manager.prefix_cache_stats
    if stats is None:
        return
    if stats is not opened:  # these are new
        _take_all_back(stats, _NONE, counters)
    scheduled = getattr(output, "num_scheduled_tokens", {})
    for request in admitted:
        if not request.skip_reading_prefix_cache:
            hits = request.num_computed_tokens - scheduled.get(request.request_id, 0)
            stats.record(request.num_tokens, hits, request.num_preemptions > 0)
            counters.settled += 1
