"""What needs further packages, or does not run on a CPU: measured, so that a release that does run it is noticed."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from typing import Any

import pytest
from engines import FIX, NO_GROWTH, SENT, TRUE_HITS, refusal, run, without_and_with

from kvmend_fixes.demos._scenarios import DEFERRALS, DEFERRING_CONNECTOR

pytestmark = [pytest.mark.engine, pytest.mark.engine_more]

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
needs_lmcache = pytest.mark.skipif(importlib.util.find_spec("lmcache") is None, reason="LMCache is not installed")


def must_say(reason: str, lines: list[str]) -> None:
    assert any(reason in line for line in lines), "\n".join(lines[-25:])


@pytest.mark.parametrize(
    ("connector", "reason"),
    [
        ("OffloadingConnector", "CPU Offloading is currently only supported on CUDA-alike and XPU GPUs"),
        ("SimpleCPUOffloadConnector", "type object '_StreamPlaceholder' has no attribute 'priority_range'"),
    ],
)
def test_vllm_s_own_offloading_to_the_cpu_wants_an_accelerator(tmp_path: Path, connector: str, reason: str) -> None:
    """Catches a release that takes a CPU, so that its worker side can be tested, too."""
    config: dict[str, Any] = {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1_000_000_000},
    }
    must_say(reason, refusal(tmp_path, multiprocessing=False, kv_transfer_config=config))


@needs_ray
def test_ray_workers_want_a_platform_that_has_a_resource_for_ray(tmp_path: Path) -> None:
    """Catches a release whose CPU backend takes Ray, so that its workers can be tested."""
    lines = refusal(tmp_path, tensor_parallel_size=2, distributed_executor_backend="ray")
    must_say("ValueError: current platform cpu does not support ray.", lines)


@needs_lmcache
def test_lmcache_has_no_worker_side_for_a_cpu_and_its_scheduler_side_costs_no_count(tmp_path: Path) -> None:
    """Catches lookups counted for refused admissions with somebody else's connector, and an LMCache that takes a CPU.

    vLLM goes on without LMCache's worker side; each of its lookups then ends with a time-out.
    """
    ran = run(
        tmp_path,
        NO_GROWTH,
        multiprocessing=False,
        kv_transfer_config={"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
        variables={"LMCACHE_LOOKUP_TIMEOUT_MS": "10", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"},
    )
    must_say("RuntimeError: No supported cpu connector found.", ran.lines)
    assert ran.counted == (SENT, TRUE_HITS, TRUE_HITS)
    assert ran.external["hits"] == 0


@needs_ray
def test_with_data_parallelism_by_ray_each_actor_counts_right(tmp_path: Path) -> None:
    """Catches actors without the fix, or without the switches, of which Ray gets only those with known prefixes.

    The CPU backend names no resource that Ray could place actors by; a plugin does so here.
    """
    without, mended = without_and_with(
        tmp_path,
        DEFERRING_CONNECTOR,
        transport="http",
        plugins={"ray": "engine_plugins:ray_places_by_cpu"},
        variables={
            "VLLM_HOST_IP": own_address(),
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY": "KVMEND",
            "RAY_OVERRIDE_RESOURCES": '{"CPU": 16}',
            "RAY_USAGE_STATS_ENABLED": "0",
        },
        data_parallel_size=2,
        data_parallel_backend="ray",
        distributed_executor_backend="mp",
    )
    (copied,) = [line for line in mended.lines if "environment variables to EngineCoreActor" in line]
    assert "'KVMEND_STATE_DIR'" in copied
    assert mended.reading.queries == SENT
    assert mended.reading.hits == mended.reading.true_hits
    assert without.reading.queries == (DEFERRALS + 1) * SENT
    applied = [each for each in mended.members if each.outcomes[FIX] == "applied"]
    assert len(applied) == 2


def own_address() -> str:
    """The address by which Ray knows this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 80))  # nothing is sent
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
