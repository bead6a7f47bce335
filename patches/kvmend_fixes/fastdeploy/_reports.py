"""What a request was reported to have had from the cache, corrected when its first computed token moves.

A hit is reported at preallocation, long before the request is scheduled: in the request's own fields, in the cache
manager's running totals and in the process's Prometheus counters. Counters cannot be decreased (a scraper would take
that for a restart and count everything again), so what was counted too much is kept as a debt and left out of the
increments that follow.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_METRICS = "fastdeploy.metrics.metrics"
_ALL = "prefix_cache_token_num"
#: Last block first: a hit is made of GPU blocks, then blocks swapped in, then blocks fetched from storage.
_TIERS = (
    ("storage_cache_token_num", None, "total_storage_matched_token_num"),
    ("cpu_cache_token_num", "prefix_cpu_cache_token_num", "total_cpu_matched_token_num"),
    ("gpu_cache_token_num", "prefix_gpu_cache_token_num", "total_gpu_matched_token_num"),
)


def move_start(manager: Any, request: Any, start: int, debts: dict[str, int]) -> None:
    """Makes a request compute from token `start` on, and makes every report of its hit say so.

    Args:
        manager: The ResourceManagerV1, whose lock is held.
        request: A request that still needs prefill.
        start: The new number of computed tokens.
        debts: Tokens counted too much so far, by Prometheus counter; updated.
    """
    before, cached_before = request.num_computed_tokens, request.num_cached_tokens
    cached = start if start < before else cached_before + start - before
    request.num_computed_tokens = start
    request.num_cached_tokens = cached
    info = getattr(request, "cache_info", None)
    if info:
        block_size = manager.config.cache_config.block_size
        lacking = request.need_prefill_tokens - cached
        request.cache_info = type(info)((cached // block_size, -(-lacking // block_size)))
    # The fields are on the request up to 2.4, on its metrics later.
    holder = request.metrics if hasattr(getattr(request, "metrics", None), _TIERS[-1][0]) else request
    values = [getattr(holder, field, None) or 0 for field, _, _ in _TIERS]
    # A request that was preempted is not reported again; nor is it corrected.
    if not getattr(request, "has_been_preempted_before", False):
        change = start - sum(values) if start < before else start - before
        for (field, counter, _), value, part in zip(_TIERS, values, _split(change, values), strict=True):
            if part:
                setattr(holder, field, max(value + part, 0))
                if counter is not None:
                    _count(counter, part, debts)
        _count(_ALL, change, debts)
    # The manager's totals count a full match as a whole, so what they lose is not what the fields lose.
    totals = manager.cache_manager.metrics
    for (_, _, total), part in zip(_TIERS, _split(cached - cached_before, values), strict=True):
        if part:
            setattr(totals, total, max(getattr(totals, total) + part, 0))
    totals.matched_token_num = max(totals.matched_token_num + cached - cached_before, 0)
    totals.hit_req_count = max(totals.hit_req_count + (cached > 0) - (cached_before > 0), 0)
    if totals.req_count and totals.total_token_num:
        totals._update_history_hit_metrics()


def _split(change: int, values: list[int]) -> list[int]:
    """Shares a change of a hit among its tiers: a loss from the last block on, a gain and any rest to the GPU."""
    parts = []
    for value in values[:-1]:
        part = max(change, -value) if change < 0 else 0
        parts.append(part)
        change -= part
    return [*parts, change]


def _count(counter: str, tokens: int, debts: dict[str, int]) -> None:
    owed = debts.get(counter, 0)
    if tokens < 0:
        debts[counter] = owed - tokens
        return
    debts[counter] = max(owed - tokens, 0)
    if tokens > owed:
        getattr(_process_metrics(), counter).inc(tokens - owed)


def _process_metrics() -> Any:
    return sys.modules[_METRICS].main_process_metrics


class _Repaid:
    """Stands in for a Prometheus counter during one lookup: leaves what is owed out of its increments."""

    def __init__(self, counter: Any, name: str, debts: dict[str, int]) -> None:
        self._counter, self._name, self._debts = counter, name, debts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._counter, name)

    def inc(self, amount: float = 1) -> None:
        """Like `Counter.inc`, less the debt."""
        owed = min(self._debts.get(self._name, 0), int(amount))
        self._debts[self._name] = self._debts.get(self._name, 0) - owed
        self._counter.inc(amount - owed)


@contextmanager
def repaying(debts: dict[str, int]) -> Iterator[None]:
    """While it is open, increments of the counters in `debts` first pay back what was counted too much."""
    metrics = _process_metrics()
    owed = {name: getattr(metrics, name) for name, tokens in debts.items() if tokens}
    try:
        for name, counter in owed.items():
            setattr(metrics, name, _Repaid(counter, name, debts))
        yield
    finally:
        for name, counter in owed.items():
            setattr(metrics, name, counter)
