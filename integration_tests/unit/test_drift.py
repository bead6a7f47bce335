"""`nox -s drift`: what it says of releases that the tables of known sources do not name, on toy wheels."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from upstream import drift
from upstream.drift import KNOWN, NATIVE, UNKNOWN, UNREADABLE, News
from upstream.known_sources import released, wheel

from kvmend.fix import Fix
from support import toyfw
from support.toyfix import make_fix, site, write_table

WITHOUT_COUNT = toyfw.RELEASES["2.0"]["engine"]
MOVED = {"engine": toyfw.ENGINE.replace("len(request) < limit", "len(request) <= limit")}


class Shelf:
    """An index of toy wheels: distribution to release to what differs from which toy release."""

    def __init__(self, **distributions: Mapping[str, tuple[str, Mapping[str, str]]]) -> None:
        self.distributions = {name.replace("_", "-"): releases for name, releases in distributions.items()}
        self.taken: list[str] = []

    def released(self, distribution: str) -> list[Version]:
        return sorted(map(Version, self.distributions.get(distribution, {})))

    def wheel(self, distribution: str, version: Version, into: str) -> Path:
        self.taken.append(f"{distribution} {version}")
        like, changes = self.distributions[distribution][str(version)]
        if like == "none":
            raise OSError("there is no wheel for this machine")
        (Path(into) / "work").mkdir()
        path = toyfw.write_wheel(Path(into) / "work", like, dist=distribution, changes=changes)
        return path.rename(Path(into) / f"{distribution.replace('-', '_')}-{version}-py3-none-any.whl")


@pytest.fixture
def fix(root: Path) -> Fix:
    """The toy fix with a table that knows 1.0 and 1.1."""
    return make_fix(fingerprints=write_table(root, make_fix(), "1.0", "1.1"))


@pytest.fixture
def said(fix: Fix, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the command on a shelf; gives its exit code and what it printed."""

    def run(shelf: Shelf, *fixes: Fix) -> tuple[int, str]:
        code = drift.main([], fixes or [fix], shelf, width=250)
        return code, capsys.readouterr().out

    return run


def only(fix: Fix, shelf: Shelf) -> News:
    (news,) = drift.news([fix], shelf, drift.Console(quiet=True))
    return news


def test_nothing_new_is_exit_code_0_and_takes_no_wheel(said: Callable[..., Any]) -> None:
    shelf = Shelf(toyfw={"1.0": ("1.0", {}), "1.1": ("1.1", {})}, toyfw_cpu={"1.1": ("1.1", {})})
    code, printed = said(shelf)
    assert code == 0
    assert "Nothing new" in printed
    assert shelf.taken == []


def test_a_new_release_with_a_known_source_is_named_and_is_exit_code_0(said: Callable[..., Any], fix: Fix) -> None:
    shelf = Shelf(toyfw={"1.1.post1": ("1.1", {})})
    assert only(fix, shelf) == News(
        release="toyfw 1.1.post1",
        fix="toy-count",
        verdict=KNOWN,
        probed="affected",
        against="1.1",
        remark="source is that of 1.1; the lookup counts",
    )
    code, printed = said(shelf)
    assert code == 0
    assert "toyfw 1.1.post1" in printed


def test_a_moved_body_is_named_with_the_release_it_moved_since(said: Callable[..., Any], fix: Fix) -> None:
    shelf = Shelf(toyfw={"1.2": ("1.1", MOVED)})
    news = only(fix, shelf)
    assert (news.verdict, news.probed, news.against) == (UNKNOWN, "affected", "1.1")
    assert news.moved == ("Engine.admit differs",)
    assert news.remark == "looks affected: the lookup counts"
    code, printed = said(shelf)
    assert code == 1
    assert "Engine.admit differs" in printed


def test_a_body_that_is_gone_is_said_to_be_gone(fix: Fix) -> None:
    engine = toyfw.ENGINE.replace("def admit(", "def accept(")
    news = only(fix, Shelf(toyfw={"1.2": ("1.1", {"engine": engine})}))
    assert (news.verdict, news.probed) == (UNKNOWN, "unknown")
    assert news.moved == ("Engine.admit is gone",)


def test_a_body_that_the_release_before_lacked_is_said_to_be_new(root: Path) -> None:
    sites = (site("Engine.lookup"), site("Engine.retry"))
    fix = make_fix(*sites, fingerprints=write_table(root, make_fix(*sites), "1.0"))
    engine = toyfw.ENGINE.replace("    @staticmethod", "    def retry(self):\n        pass\n\n    @staticmethod")
    assert only(fix, Shelf(toyfw={"1.2": ("1.0", {"engine": engine})})).moved == ("Engine.retry is new",)


def test_a_release_that_upstream_fixed_is_a_native_fix(said: Callable[..., Any], fix: Fix) -> None:
    shelf = Shelf(toyfw={"2.0": ("2.0", {})})
    news = only(fix, shelf)
    assert (news.verdict, news.probed) == (NATIVE, "fixed")
    assert news.moved == ("Engine.lookup differs", "Engine.admit differs")
    assert said(shelf)[0] == 1


def test_a_change_after_the_native_fix_is_an_unknown_source(root: Path) -> None:
    fix = make_fix(fingerprints=write_table(root, make_fix(), "1.0", "2.0"))
    changed = {"engine": WITHOUT_COUNT.replace("limit=4", "limit=16")}
    news = only(fix, Shelf(toyfw={"2.1": ("2.0", changed)}))
    assert (news.verdict, news.probed, news.against) == (UNKNOWN, "fixed", "2.0")


def test_a_release_is_compared_with_the_newest_known_one_below_it(root: Path) -> None:
    fix = make_fix(fingerprints=write_table(root, make_fix(), "1.0", "2.0"))
    assert only(fix, Shelf(toyfw={"1.5": ("1.1", {})})).against == "1.0"


def test_what_is_older_than_every_known_release_is_not_looked_at(said: Callable[..., Any]) -> None:
    shelf = Shelf(toyfw={"0.9": ("3.0", {})})
    assert said(shelf)[0] == 0
    assert shelf.taken == []


@pytest.mark.parametrize("like", ["none", "1.0"])
def test_a_wheel_that_cannot_be_read_is_named_with_the_reason(like: str, root: Path, said: Callable[..., Any]) -> None:
    framework = make_fix().framework
    other = type(framework)(name="ToyFW", package="toyfw2", distributions=framework.distributions, logger="toyfw")
    table = write_table(root, make_fix(), "1.0")
    fix = make_fix(fingerprints=table)
    if like == "1.0":
        sites = (site("Engine.lookup", module="toyfw2.engine"),)
        fix = make_fix(*sites, framework=other, bodies=(), fingerprints=table)
    shelf = Shelf(toyfw={"1.2": (like, {})})
    news = only(fix, shelf)
    assert news.verdict == UNREADABLE
    assert news.remark in ("no wheel: there is no wheel for this machine", "the wheel has no package toyfw2")
    assert said(shelf, fix)[0] == 1


def test_every_distribution_is_looked_at(fix: Fix) -> None:
    shelf = Shelf(toyfw={"1.2": ("1.1", {})}, toyfw_cpu={"1.2": ("1.1", {}), "1.3": ("1.1", {})})
    found = drift.news([fix], shelf, drift.Console(quiet=True))
    assert [each.release for each in found] == ["toyfw 1.2", "toyfw-cpu 1.2", "toyfw-cpu 1.3"]


def test_a_wheel_is_taken_once_for_all_fixes(root: Path, fix: Fix) -> None:
    second = make_fix(id="toy-other", fingerprints=fix.fingerprints)
    shelf = Shelf(toyfw={"1.2": ("1.1", {})})
    found = drift.news([fix, second], shelf, drift.Console(quiet=True))
    assert [each.fix for each in found] == ["toy-count", "toy-other"]
    assert shelf.taken == ["toyfw 1.2"]


@pytest.mark.slow
def test_releases_and_wheels_come_from_the_index_that_pip_is_set_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "index"
    folder.mkdir()
    for release in ("1.0", "1.1"):
        with zipfile.ZipFile(toyfw.write_wheel(folder, release), "a") as archive:
            archive.writestr(f"toyfw-{release}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    assert released("toyfw", Version("1.0"), None) == [Version("1.0"), Version("1.1")]
    assert released("toyfw", Version("1.1"), None) == [Version("1.1")]
    taken = tmp_path / "taken"
    taken.mkdir()
    assert wheel("toyfw", Version("1.1"), str(taken)).name == "toyfw-1.1-py3-none-any.whl"


def test_the_real_tables_name_versions_only() -> None:
    from kvmend.cli.catalogue import all_fixes

    fixes = [fix for fix in all_fixes() if fix.framework.package in drift.PACKAGES and fix.fingerprints]
    assert fixes
    assert all(drift.listed(drift.load_table(fix.fingerprints)) for fix in fixes)
