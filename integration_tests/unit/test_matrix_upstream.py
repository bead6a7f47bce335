"""`nox -s upstream`: what a pair of runs of upstream's own tests shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from upstream import stand_ins, suite
from upstream.suite import Run, judged, judged_fix

APPLIED, FIXED = frozenset({"applied"}), frozenset({"already_fixed"})


def run(passed: str, failed: str = "", kvmend: frozenset[str] = APPLIED) -> Run:
    """A run; each letter is a test."""
    return Run({f"t::{name}": "passed" for name in passed} | {f"t::{name}": "failed" for name in failed}, kvmend)


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What further runs give, in turn, and after that what was asked to run again."""
    runs: list[Any] = []

    def pretend(release: str, tests: str, *, mended: bool, select: Any = (), conftest: bool = True) -> Run:
        found = runs.pop(0)
        runs.append(tuple(select))
        return found

    monkeypatch.setattr(suite, "run", pretend)
    return runs


def test_the_same_tests_passing_is_right_whatever_fails(again: list[Any]) -> None:
    verdict = judged("1.0", "tests", run("ab", "c"), run("ab", "c"), Console(quiet=True))
    assert (verdict.right, verdict.text) == (True, "the same tests pass")
    assert again == []


def test_a_test_that_keeps_passing_one_way_only_is_wrong_and_named(again: list[Any]) -> None:
    again += [run("b"), run("", "b")]
    verdict = judged("1.0", "tests", run("ab"), run("a", "b"), Console(quiet=True))
    assert (verdict.right, verdict.tests) == (False, ("t::b",))
    assert again == [("b",), ("b",)]


def test_a_test_that_passes_both_ways_the_next_time_decides_nothing_and_is_named(again: list[Any]) -> None:
    again += [run("b"), run("b")]
    verdict = judged("1.0", "tests", run("ab"), run("a", "b"), Console(quiet=True))
    assert (verdict.right, verdict.tests) == (True, ("t::b",))
    assert "1 that pass by chance" in verdict.text


@pytest.mark.parametrize(
    ("without", "with_", "right"),
    [
        (run("a", "bc"), run("abc"), True),
        (run("a", "bc"), run("a", "bc"), False),
        (run("a", "bc"), run("bc", "a"), False),
        (run("", "abc"), run("", "abc"), True),
        (run("abc"), run("abc", kvmend=FIXED), True),
        (run("abc"), run("ab", "c", kvmend=FIXED), False),
    ],
)
def test_more_tests_of_the_fix_must_pass_where_it_is_applied_and_none_be_lost(
    without: Run, with_: Run, right: bool
) -> None:
    assert judged_fix(without, with_).right is right


def test_stand_ins_are_folders_that_answer_for_models(tmp_path: Path) -> None:
    stand_ins.write_models(tmp_path)
    assert (tmp_path / "facebook" / "opt-125m" / "config.json").is_file()
    assert {path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("config.json")} == set(
        stand_ins.CONFIGS
    )
