"""Leading a decision without changing anything, and waiting without silence."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvmend_fixes.fastdeploy import _xpu_steer
from kvmend_fixes.fastdeploy._launch_rule import TO_ATTACH, TO_CREATE
from kvmend_fixes.fastdeploy._xpu_steer import CreatorMissing, await_creator, configuration_of, describe, led


class Runner:
    """As much of a runner as leading and waiting look at."""

    def __init__(self, role: str = "mixed", cpu_blocks: int | None = 8, storage: str | None = None) -> None:
        caching = SimpleNamespace(num_cpu_blocks=cpu_blocks, kvcache_storage_backend=storage)
        caching.enable_prefix_caching = True
        scheduling = SimpleNamespace(splitwise_role=role, max_num_seqs=8)
        self.fd_config = SimpleNamespace(cache_config=caching, scheduler_config=scheduling, other="kept")
        self.cache_config, self.scheduler_config = caching, scheduling
        self.parallel_config = SimpleNamespace(tensor_parallel_size=2, local_engine_worker_queue_port=9923)
        self.local_rank, self.num_gpu_blocks = 3, 0

    def me(self) -> Any:
        return self


def test_a_led_runner_reads_differently_under_every_name() -> None:
    seen = led(Runner(storage="mooncake"), TO_CREATE)
    for caching in (seen.cache_config, seen.fd_config.cache_config):
        assert (caching.num_cpu_blocks, caching.kvcache_storage_backend) == (0, None)
    seen = led(Runner(), TO_ATTACH)
    for scheduling in (seen.scheduler_config, seen.fd_config.scheduler_config):
        assert scheduling.splitwise_role == "prefill"
        assert scheduling.max_num_seqs == 8


def test_the_runner_itself_reads_as_before_while_it_is_led() -> None:
    """Fails for a lead that changes a shared object: another thread would see a role that is not there."""
    runner = Runner()
    seen = led(runner, TO_ATTACH)
    assert seen.scheduler_config.splitwise_role == "prefill"
    assert runner.scheduler_config.splitwise_role == "mixed"
    assert runner.fd_config.scheduler_config.splitwise_role == "mixed"


def test_what_is_set_on_a_led_runner_is_set_on_the_runner() -> None:
    runner = Runner()
    seen = led(runner, TO_ATTACH)
    seen.num_gpu_blocks = 40
    assert runner.num_gpu_blocks == 40
    del seen.local_rank
    assert not hasattr(runner, "local_rank")


def test_a_led_runner_passes_for_what_it_is() -> None:
    runner = Runner()
    seen = led(runner, TO_ATTACH)
    assert isinstance(seen, Runner)
    assert seen.me() is runner
    assert seen.fd_config.other == "kept"
    with pytest.raises(AttributeError):
        _ = seen.no_such_thing


def test_a_worker_of_a_release_without_storage_or_swap_settings_has_neither() -> None:
    runner = Runner(cpu_blocks=None)
    del runner.fd_config.cache_config.kvcache_storage_backend
    assert configuration_of(runner).name == "mixed+prefix"
    assert describe(runner) == "role mixed, num_cpu_blocks 0, storage backend none, prefix caching on"


class Clock:
    """Stands in for `time`; the creator is ready at a given second."""

    def __init__(self, signal: list[int], ready_at: float) -> None:
        self.now, self.signal, self.ready_at = 0.0, signal, ready_at

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.ready_at:
            self.signal[1] = 1


def waiting(monkeypatch: pytest.MonkeyPatch, ready_at: float) -> tuple[Clock, Any]:
    signal = [1, 0]
    clock = Clock(signal, ready_at)
    monkeypatch.setattr(_xpu_steer, "time", clock)
    monkeypatch.setattr(_xpu_steer, "_ready_signal", lambda runner, suffix: (1, SimpleNamespace(value=signal)))
    return clock, SimpleNamespace(awaited=0, overdue=0)


def wait(counters: Any) -> None:
    suffix, who = "local_engine_worker_queue_port", "the transfer manager (launch rule: storage)"
    await_creator(Runner(storage="mooncake"), suffix, who, logging.getLogger("fastdeploy"), counters)


def test_a_wait_says_every_30_seconds_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails for a wait in silence, which is all that an operator sees of a creator that died."""
    _clock, counters = waiting(monkeypatch, ready_at=100)
    with caplog.at_level("WARNING"):
        wait(counters)
    assert len(caplog.records) == counters.overdue == 3
    first = caplog.records[0].getMessage()
    for part in ("30 s", "rank 1", "the transfer manager", "launch rule: storage", "role mixed", "num_cpu_blocks 8"):
        assert part in first
    assert "storage backend mooncake" in first
    assert "cache_ready_signal.9923 reads [1, 0]" in first


def test_a_short_wait_says_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    _clock, counters = waiting(monkeypatch, ready_at=20)
    wait(counters)
    assert (counters.awaited, counters.overdue, caplog.records) == (1, 0, [])


def test_under_strict_the_process_stops_after_10_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, counters = waiting(monkeypatch, ready_at=1e9)
    monkeypatch.setenv("KVMEND_STRICT", "1")
    with pytest.raises(CreatorMissing, match="launch rule: storage"):
        wait(counters)
    assert 600 <= clock.now <= 631
    assert counters.overdue == 20


def test_without_strict_it_waits_for_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails for a fix that stops a server by itself, or that creates behind another's back."""
    clock, counters = waiting(monkeypatch, ready_at=7200)
    monkeypatch.delenv("KVMEND_STRICT", raising=False)
    wait(counters)
    assert clock.now >= 7200


def test_a_signal_that_cannot_be_opened_is_left_to_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails for a guard that breaks a start which would have failed, or gone on, in its own words."""
    counters = SimpleNamespace(awaited=0, overdue=0)
    monkeypatch.setattr(_xpu_steer, "_ready_signal", lambda runner, suffix: (0, None))
    wait(counters)
    assert counters.awaited == 1


def test_a_rank_looks_at_its_own_place_in_the_signal_of_its_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails for a guard that waits for another rank: it would let this one through too early, or never speak."""
    opened: list[dict[str, Any]] = []

    def signal(**given: Any) -> Any:
        opened.append(given)
        return SimpleNamespace(value=given["array"])

    numpy = SimpleNamespace(zeros=lambda shape, dtype: [0] * shape[0], int32="int32")
    monkeypatch.setitem(sys.modules, "numpy", numpy)  # type: ignore[arg-type]
    signals = SimpleNamespace(IPCSignal=signal)
    monkeypatch.setitem(sys.modules, "fastdeploy.inter_communicator", signals)  # type: ignore[arg-type]
    rank, found = _xpu_steer._ready_signal(Runner(), "local_engine_worker_queue_port")
    assert (rank, found.value) == (1, [0, 0])
    assert opened[0]["name"] == "cache_ready_signal"
    assert (opened[0]["suffix"], opened[0]["create"]) == (9923, False)


def test_a_signal_that_nobody_has_made_is_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def signal(**_given: Any) -> Any:
        raise FileNotFoundError

    numpy = SimpleNamespace(zeros=lambda shape, dtype: [0] * shape[0], int32="int32")
    monkeypatch.setitem(sys.modules, "numpy", numpy)  # type: ignore[arg-type]
    signals = SimpleNamespace(IPCSignal=signal)
    monkeypatch.setitem(sys.modules, "fastdeploy.inter_communicator", signals)  # type: ignore[arg-type]
    assert _xpu_steer._ready_signal(Runner(), "local_engine_worker_queue_port") == (0, None)
