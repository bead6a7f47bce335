"""What each process of a framework calls itself in its report."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import kvmend_fixes.vllm
from kvmend import applier, report
from kvmend.fix import Framework, Role
from kvmend_fixes.fastdeploy import FASTDEPLOY
from kvmend_fixes.vllm import VLLM
from support.toyfix import make_fix

SERVE = ("/usr/bin/vllm", "serve", "model")
TRANSFER = ("--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}')


def asked(framework: Framework, command: tuple[str, ...], name: str = "MainProcess", **environ: str) -> Role:
    assert framework.role is not None
    return framework.role(command, environ, name)


@pytest.mark.parametrize(
    ("command", "name", "expected"),
    [
        (SERVE, "MainProcess", Role(name="API server")),
        (("/x/vllm/entrypoints/openai/api_server.py", "--model", "m"), "MainProcess", Role(name="API server")),
        (SERVE, "ApiServer_1", Role(name="API server", rank=1)),
        (SERVE, "EngineCore", Role(name="EngineCore")),
        (SERVE, "EngineCore_0", Role(name="EngineCore", rank=0)),
        (SERVE, "EngineCore_DP3", Role(name="EngineCore", rank=3)),
        (SERVE, "VllmWorker-7", Role(name="worker", rank=7)),
        (("batch.py",), "MainProcess", Role(name="main process")),
        ((), "MainProcess", Role(name="main process")),
        (("/x/ray/_private/workers/default_worker.py",), "MainProcess", Role(name="worker")),
        ((*SERVE, *TRANSFER), "EngineCore_DP1", Role(name="EngineCore", rank=1, node="prefill")),
        ((*SERVE, TRANSFER[1].replace("producer", "consumer")), "VllmWorker-0",
         Role(name="worker", rank=0, node="decode")),
        ((*SERVE, "--kv-transfer-config.kv_role", "kv_both"), "MainProcess", Role(name="API server", node="mixed")),
        ((*SERVE, '{"kv_role": "kv_unheard_of"}'), "MainProcess", Role(name="API server")),
    ],
)  # fmt: skip
def test_a_process_of_vllm_is_known_by_its_name_and_command(
    command: tuple[str, ...], name: str, expected: Role
) -> None:
    assert asked(VLLM, command, name) == expected


def test_a_worker_that_ray_started_has_its_rank_from_the_world_group(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(_WORLD=SimpleNamespace(rank=5))
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)  # type: ignore[arg-type]
    assert asked(VLLM, ("/x/ray/_private/workers/default_worker.py",)) == Role(name="worker", rank=5)
    state._WORLD = None  # type: ignore[assignment]
    assert asked(VLLM, ("/x/ray/_private/workers/default_worker.py",)) == Role(name="worker")


def test_an_engine_core_that_ray_started_is_known_by_its_title(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvmend_fixes.vllm, "_title", lambda: "ray::DPEngineCoreActor.run")
    assert asked(VLLM, ("/x/ray/_private/workers/default_worker.py",)) == Role(name="EngineCore")


@pytest.mark.parametrize(
    ("command", "name", "expected"),
    [
        (("/x/api_server.py", "--model", "m"), "MainProcess", Role(name="API server", node="mixed")),
        (("/x/api_server.py", "--splitwise-role", "prefill"), "MainProcess", Role(name="API server", node="prefill")),
        (("/x/api_server.py", "--splitwise-role=decode"), "Process-1", Role(name="engine", node="decode")),
        (("/x/api_server.py",), "ForkProcess-2", Role(name="engine", node="mixed")),
        (("/x/worker_process.py", "--splitwise_role", "prefill"), "MainProcess",
         Role(name="worker", rank=2, node="prefill")),
        (("/x/cache_transfer_manager.py", "--rank", "3", "--splitwise_role", "mixed"), "MainProcess",
         Role(name="transfer manager", rank=3, node="mixed")),
        (("/x/cache_messager.py", "--splitwise_role", "decode", "--rank", "0"), "MainProcess",
         Role(name="messager", rank=0, node="decode")),
        (("batch.py",), "MainProcess", Role(name="main process", node="mixed")),
        (("-m",), "MainProcess", Role(name="main process", node="mixed")),
        (("/x/cache_messager.py", "--rank"), "MainProcess", Role(name="messager", node="mixed")),
        (("/x/cache_messager.py", "--splitwise_role", "odd"), "MainProcess", Role(name="messager")),
    ],
)  # fmt: skip
def test_a_process_of_fastdeploy_is_known_by_its_script_and_options(
    command: tuple[str, ...], name: str, expected: Role
) -> None:
    assert asked(FASTDEPLOY, command, name, PADDLE_TRAINER_ID="2") == expected


def broken(command: Any, environ: Any, name: str) -> Role:
    raise RuntimeError("no idea")


@pytest.mark.parametrize("role", [None, broken])
def test_a_framework_that_does_not_know_leaves_the_role_open(monkeypatch: pytest.MonkeyPatch, role: Any) -> None:
    monkeypatch.setattr("kvmend.journal.JOURNAL.entries", {})
    applier.apply(make_fix(framework=Framework(name="F", package="toyfw", distributions=(), logger="f", role=role)))
    assert report.snapshot()["role"] == {"name": "", "rank": None, "node": ""}
