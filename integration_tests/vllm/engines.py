"""Real engines for tests: started without the fix and with it, read, and gone afterwards, whatever happens.

A start takes 10 s for an engine in one process and twice that for one with processes of its own, on two quiet cores.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvmend_fixes.demos import vllm_prefix_stats
from kvmend_fixes.demos._processes import DemoError, Processes, _compiled
from kvmend_fixes.demos._scenarios import KV_PRESSURE, Reading, Scenario
from support.interpreter import INTEGRATION_TESTS
from support.toyfw import write_dist_info

FIX = "vllm-prefix-stats"
COPIED = "vllm-prefix-stats-copied-scheduler"
REQUESTS = 48
SENT = REQUESTS * 168
#: Seconds that a start, and then its requests, may take; more can be given on a machine that is busy with other things.
DEADLINE = float(os.environ.get("ENGINE_TEST_SECONDS", "420"))
_LAST_LINES = 25

#: 14 requests at a time have the two blocks that each needs from first to last token, one of them shared: admissions
#: are refused at every step, and no request is ever preempted.
NO_GROWTH = dataclasses.replace(
    KV_PRESSURE, name="no growth", engine={**KV_PRESSURE.engine, "block_size": 128, "num_gpu_blocks_override": 16}
)
#: The first of the 48 prompts finds nothing, the 47 others the 128 tokens they share with it.
TRUE_HITS = 47 * 128


@dataclass(frozen=True, slots=True)
class Member:
    """One process of an engine, as kvmend reported from it.

    Attributes:
        pid: Its id.
        parent: The id of the process that started it.
        forked_from: The id of the process whose memory it has, or None.
        outcomes: What became of each of kvmend's fixes for vLLM, by fix.
        counters: What each of them counted until the process reported last, by fix.
        inherited: Whether it has the fixes from the process that forked it.
    """

    pid: int
    parent: int
    forked_from: int | None
    outcomes: Mapping[str, str]
    counters: Mapping[str, Mapping[str, int]]
    inherited: bool


@dataclass(frozen=True, slots=True)
class Ran:
    """An engine that answered all its requests.

    Attributes:
        reading: What it counted, and what was true.
        root: The process that was started, without parents among the members.
        members: All its processes that loaded kvmend and lived to report.
        external: Counters of KV connectors, `queries` and `hits`, in tokens; empty over HTTP.
        lines: Its output, without the empty lines.
    """

    reading: Reading
    root: Member
    members: tuple[Member, ...]
    external: Mapping[str, int]
    lines: list[str]

    @property
    def counted(self) -> tuple[int, int, int | None]:
        """Queries, hits and true hits."""
        return self.reading.queries, self.reading.hits, self.reading.true_hits

    def children(self, *parents: Member) -> list[Member]:
        """The processes that these started."""
        return [each for each in self.members if each.parent in {parent.pid for parent in parents}]

    def workers(self) -> list[Member]:
        """The processes that the engine cores started."""
        return self.children(*self.children(self.root))


def run(folder: Path, *args: Any, **kwargs: Any) -> Ran:
    """Runs a scenario on one new engine, and fails the test with the engine's last output if it dies or hangs.

    Args:
        folder: A folder for everything that it leaves behind.
        args: See `measure`.
        kwargs: See `measure`.
    """
    try:
        reading = measure(folder, *args, **kwargs)
    except DemoError as error:
        pytest.fail("\n".join([str(error), "its last output:", *_lines(folder)[-_LAST_LINES:]]), pytrace=False)
    members = loaded(folder)
    (root,) = [each for each in members if each.parent == os.getpid()]
    answer = folder / "result.json"
    result = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}
    external = {name: result[f"external_{name}"] for name in ("queries", "hits") if result}
    return Ran(reading, root, members, external, _lines(folder))


def refusal(folder: Path, *args: Any, **kwargs: Any) -> list[str]:
    """Runs a scenario on an engine that must not come up.

    Args:
        folder: See `measure`.
        args: See `measure`.
        kwargs: See `measure`.

    Returns:
        The lines of its output, without the empty ones.
    """
    with pytest.raises(DemoError, match=r"^the engine ended with exit code [1-9]"):
        measure(folder, *args, **kwargs)
    return _lines(folder)


def measure(
    folder: Path,
    scenario: Scenario = KV_PRESSURE,
    transport: str = "offline",
    *,
    mended: bool = True,
    multiprocessing: bool = True,
    plugins: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
    **engine: Any,
) -> Reading:
    """Runs a scenario on one new engine.

    Args:
        folder: A folder for everything that it leaves behind.
        scenario: The load and the engine.
        transport: "offline" or "http".
        mended: Whether the fix is on; if not, KVMEND_VLLM_PREFIX_STATS=0 and its sibling's switch say so.
        multiprocessing: VLLM_ENABLE_V1_MULTIPROCESSING.
        plugins: More plugins for vLLM to load, before kvmend: names to functions, as in "engine_plugins:fork".
        variables: More environment variables.
        engine: More engine arguments.

    Raises:
        DemoError: The engine died, or took too long.
    """
    environment = {"PYTHONPATH": _python_path(folder, plugins or {})}
    if "PYTHONDONTWRITEBYTECODE" in os.environ and not _compiled("vllm"):
        # Once for all tests: compiling vLLM and torch takes longer than the rest of a start.
        environment["PYTHONPYCACHEPREFIX"] = str(Path(sys.prefix) / "pycache")
    if not mended:
        environment |= {"KVMEND_VLLM_PREFIX_STATS": "0", "KVMEND_VLLM_PREFIX_STATS_COPIED_SCHEDULER": "0"}
    processes = Processes()
    try:
        return vllm_prefix_stats.measure(
            processes,
            dataclasses.replace(scenario, engine={**scenario.engine, **engine}),
            transport,
            folder,
            mended=True,
            requests=REQUESTS,
            deadline=DEADLINE,
            multiprocessing=multiprocessing,
            variables=environment | dict(variables or {}),
        )
    finally:
        processes.close()


def without_and_with(folder: Path, *args: Any, **kwargs: Any) -> tuple[Ran, Ran]:
    """Runs a scenario on two engines at the same time, one with the fix off and one with it on."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        both = [pool.submit(run, folder / name, *args, mended=name == "on", **kwargs) for name in ("off", "on")]
        without, mended = (each.result() for each in both)
        return without, mended


def _python_path(folder: Path, plugins: Mapping[str, str]) -> str:
    """What engines import from beside their own environment: their folder, these tests, and plugins."""
    folder.mkdir(parents=True, exist_ok=True)
    if plugins:
        lines = ["[vllm.general_plugins]", *(f"{name} = {function}" for name, function in plugins.items()), ""]
        write_dist_info(folder, "test-plugins", "1.0", {"entry_points.txt": "\n".join(lines)})
    return os.pathsep.join(map(str, (folder, Path(__file__).parent, INTEGRATION_TESTS)))


def _lines(folder: Path) -> list[str]:
    log = folder / "engine.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def loaded(folder: Path) -> tuple[Member, ...]:
    """The processes that reported.

    vLLM looks at a model's class in a process of its own that lives for a moment: it is left out.
    """
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in (folder / "reports").glob("kvmend-*.json")]
    ours = {id(each): [fix for fix in each["fixes"] if fix["framework"] == "vLLM"] for each in reports}
    return tuple(
        Member(
            pid=each["pid"],
            parent=each["parent_pid"],
            forked_from=each["forked_from"],
            outcomes={fix["fix"]: fix["outcome"] for fix in ours[id(each)]},
            counters={fix["fix"]: fix["counters"] for fix in ours[id(each)]},
            inherited=any(fix["inherited"] for fix in ours[id(each)]),
        )
        for each in reports
        if not each["command"][0].endswith("model_executor/models/registry.py")
    )
