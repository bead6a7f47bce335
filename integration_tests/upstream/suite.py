"""Upstream's own tests, from its released sdist, with kvmend and without.

Nothing of them is kept in this repository: they are downloaded, unpacked into a cache and run where they lie.
Run as `python -m upstream.suite RELEASE` in an environment that has that release of vLLM; nox does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from upstream.stand_ins import write_models

CACHE = Path(os.environ.get("KVMEND_CACHE", Path.home() / ".cache" / "kvmend")) / "upstream"

#: What runs offline on a CPU, as far as it does; tests that want a GPU, a network or other models fail alike with and
#: without. Each is a process of its own; a release that has no such file is said to have none.
SUITES = (
    "tests/v1/core/test_scheduler.py",
    "tests/v1/core/test_async_scheduler.py",
    "tests/v1/core/test_prefix_caching.py",
    "tests/v1/core/test_kv_cache_utils.py",
    "tests/v1/kv_connector/unit",
    "tests/v1/metrics",
)

#: 0.27.0's tests of its own fix. The last one asks for an attribute that 0.26 does not have.
FIX_RELEASE = "0.27.0"
FIX_SUITE = "tests/v1/core/test_scheduler.py"
FIX_TESTS = (
    "test_prefix_cache_query_not_inflated_by_connector_defer",
    "test_prefix_cache_stats_counted_once_for_retried_then_scheduled_request",
    "test_prefix_cache_stats_not_recorded_when_caching_disabled",
    "test_preemption_re_records_prefix_cache_query",
)

CANNOT = "this release cannot run them"

#: Seconds until a test is given up, and until a suite is.
TEST_SECONDS, SUITE_SECONDS = 60, 3600
#: How kvmend may end where it is on. Tests of metrics alone may never import what it waits for.
ON, OFF = frozenset({"applied", "armed", "already_fixed"}), frozenset({"disabled"})


class NotCollected(RuntimeError):
    """pytest ended before it had any test, which is how another release's conftest.py fails that cannot be imported."""


@dataclass(frozen=True)
class Run:
    """One run of upstream tests.

    Attributes:
        outcomes: Test name to "passed", "failed" or "skipped".
        kvmend: How kvmend ended, in each process that said so.
        seconds: Wall clock.
    """

    outcomes: dict[str, str]
    kvmend: frozenset[str] = field(default=frozenset())
    seconds: float = 0.0

    @property
    def passed(self) -> set[str]:
        return {name for name, outcome in self.outcomes.items() if outcome == "passed"}

    def count(self, outcome: str) -> int:
        """How many tests ended so."""
        return sum(each == outcome for each in self.outcomes.values())


def unpacked(release: str) -> Path:
    """The folder with a release's `tests/`, downloaded if it is not there yet; renamed into place when whole."""
    folder = CACHE / release
    if not folder.exists():
        work = CACHE / f".{release}.{os.getpid()}"
        work.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
        command += ["--no-build-isolation", "--dest", str(work), f"vllm=={release}"]
        environment = os.environ | {
            "VLLM_VERSION_OVERRIDE": release,
            "VLLM_TARGET_DEVICE": "empty",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        subprocess.run(command, check=True, env=environment)
        (archive,) = work.glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            top = archive.name.removesuffix(".tar.gz")
            members = [member for member in tar.getmembers() if member.name.startswith(f"{top}/tests/")]
            tar.extractall(work, members=members, filter="data")
        root = work / top
        try:
            root.rename(folder)
        except OSError:
            if not folder.exists():
                raise
        shutil.rmtree(work)
    write_models(folder)
    return folder


def run(release: str, suite: str, *, mended: bool, select: Sequence[str] = (), conftest: bool = True) -> Run:
    """Runs upstream tests in a subprocess.

    Args:
        release: Whose tests.
        suite: A file or folder of the sdist.
        mended: Whether kvmend is on.
        select: Names to run; all if empty.
        conftest: Whether to load the sdist's conftest.py, which another release mostly cannot import.

    Raises:
        NotCollected: There was nothing to run.
        RuntimeError: They did not come to their end, or kvmend was not what it must be.
    """
    begin, folder = time.monotonic(), unpacked(release)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "support.pytest_kvmend", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=", f"--timeout={TEST_SECONDS}", "--continue-on-collection-errors", suite]
    if select:
        command += ["-k", " or ".join(select)]
    if not conftest:
        command += ["--noconftest"]
    with tempfile.TemporaryDirectory(prefix="kvmend-upstream-") as state:
        report = Path(state) / "junit.xml"
        environment = os.environ | {
            "KVMEND": "1" if mended else "0",
            "KVMEND_STRICT": "0",
            "KVMEND_STATE_DIR": state,
            "HF_HUB_OFFLINE": "1",
            "VLLM_DO_NOT_TRACK": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
        }
        try:
            done = subprocess.run(
                [*command, f"--junitxml={report}"],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=SUITE_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{suite} of {release} did not end in {SUITE_SECONDS} s") from error
        if not report.exists():
            raise NotCollected(f"{suite} of {release} did not run:\n{(done.stdout + done.stderr)[-2000:]}")
        states = [json.loads(path.read_text(encoding="utf-8")) for path in Path(state).glob("kvmend-*.json")]
        outcomes = {}
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            outcomes[f"{case.get('classname')}::{case.get('name')}"] = outcome
    seen = frozenset(fix["outcome"] for each in states for fix in each["fixes"] if fix["fix"] == "vllm-prefix-stats")
    if not seen or not seen <= (ON if mended else OFF):
        raise RuntimeError(f"kvmend was {' and '.join(sorted(seen)) or 'not loaded'} in {suite} of {release}")
    return Run(outcomes, seen, time.monotonic() - begin)


def environment_trouble() -> str:
    """Why the installed vLLM has no scheduler here, or "": then what cannot run is no matter of the release."""
    code = "import vllm.v1.core.sched.scheduler"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return (done.stderr.strip() or "no output").splitlines()[-1] if done.returncode else ""


def both(
    release: str, suite: str, console: Console, select: Sequence[str] = (), conftest: bool = True
) -> tuple[Run, Run]:
    """The runs without and with kvmend."""
    found = []
    for mended in (False, True):
        with console.status(f"{release} {suite}, {'with' if mended else 'without'} kvmend"):
            found.append(run(release, suite, mended=mended, select=select, conftest=conftest))
    return found[0], found[1]


def steady(release: str, suite: str, tests: set[str], console: Console) -> set[str]:
    """Those of the tests that pass in one of two further runs only, by kvmend; the others are upstream's own chance."""
    names = sorted({test.rpartition("::")[2].partition("[")[0] for test in tests})
    without, with_ = both(release, suite, console, names)
    return (without.passed ^ with_.passed) & tests


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a pair of runs shows: whether that is as it must be, and in a few words."""

    right: bool
    text: str
    tests: tuple[str, ...] = ()


def judged(release: str, suite: str, without: Run, with_: Run, console: Console) -> Verdict:
    """The same tests must pass; a test that passes with kvmend in one run and without in the next decides nothing."""
    differing = without.passed ^ with_.passed
    if not differing:
        return Verdict(right=True, text="the same tests pass")
    steadily = steady(release, suite, differing, console)
    if steadily:
        return Verdict(right=False, text="DIFFERENT", tests=tuple(sorted(steadily)))
    text = f"the same tests pass, but for {len(differing)} that pass by chance"
    return Verdict(right=True, text=text, tests=tuple(sorted(differing)))


def judged_fix(without: Run, with_: Run) -> Verdict:
    """0.27.0's tests of the fix: where kvmend is applied more of them must pass, and none that passed may fail."""
    if not without.passed | with_.passed:
        return Verdict(right=True, text=CANNOT)
    if "applied" in with_.kvmend:
        right = without.passed < with_.passed
        return Verdict(right=right, text="more pass with kvmend" if right else "NO MORE PASS WITH KVMEND")
    right = without.passed == with_.passed
    return Verdict(right=right, text="the same tests pass" if right else "DIFFERENT")


def main(arguments: Sequence[str]) -> int:
    """Runs the release's own suites with and without, then 0.27.0's tests of the fix; 0 if all is as it must be."""
    parser = argparse.ArgumentParser(prog="nox -s upstream --", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("release", help="the release that is installed")
    parser.add_argument("--fix-tests", action="store_true", help=f"only {FIX_RELEASE}'s tests of the fix")
    options = parser.parse_args(arguments)
    release, console, good = options.release, Console(), True
    if broken := environment_trouble():
        console.print(f"vLLM {release} cannot be imported here: {broken}", markup=False)
        return 1
    table = Table(box=None, header_style="bold")
    for heading in ("upstream tests", "on", "passed without / with", "failed", "skipped", "seconds", "verdict"):
        table.add_column(heading)
    own = () if options.fix_tests else tuple((suite, (), release) for suite in SUITES)
    for suite, select, name in (*own, (FIX_SUITE, FIX_TESTS, FIX_RELEASE)):
        title = f"{name} {'tests of the fix' if select else suite.removeprefix('tests/v1/')}"
        if not (unpacked(name) / suite).exists():
            table.add_row(title, release, "", "", "", "", "this release has none")
            continue
        try:
            without, with_ = both(name, suite, console, select, conftest=name == release)
            verdict = judged_fix(without, with_) if select else judged(name, suite, without, with_, console)
        except RuntimeError as error:
            console.print(str(error), markup=False)
            foreign = name != release and isinstance(error, NotCollected)
            table.add_row(title, release, "", "", "", "", CANNOT if foreign else "DID NOT RUN")
            good &= foreign
            continue
        for test in verdict.tests:
            console.print(f"{'passes by chance' if verdict.right else 'differs'}: {test}", markup=False)
        good &= verdict.right
        table.add_row(
            title,
            release,
            f"{len(without.passed)} / {len(with_.passed)}",
            f"{without.count('failed')} / {with_.count('failed')}",
            f"{without.count('skipped')} / {with_.count('skipped')}",
            f"{without.seconds:.0f} / {with_.seconds:.0f}",
            verdict.text,
        )
    console.print(table)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
