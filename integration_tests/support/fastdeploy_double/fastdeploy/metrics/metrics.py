"""Process-wide metrics of the double: counters that only grow, gauges that are set."""

from __future__ import annotations

from types import SimpleNamespace


class Counter:
    """Grows, as Prometheus counters do."""

    def __init__(self) -> None:
        self._value = 0.0

    def inc(self, amount: float = 1) -> None:
        if amount < 0:
            raise ValueError("Counters can only be incremented by non-negative amounts.")
        self._value += amount

    def collect(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(samples=[SimpleNamespace(value=self._value)])]


class Gauge:
    """Holds what it was set to."""

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = value


main_process_metrics = SimpleNamespace(
    prefix_cache_token_num=Counter(),
    prefix_gpu_cache_token_num=Counter(),
    prefix_cpu_cache_token_num=Counter(),
    hit_token_rate=Gauge(),
)
