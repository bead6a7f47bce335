"""Files that are byte for byte those of a release are judged by the table of known sources, without being parsed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvmend.api import AFFECTED, UNKNOWN, Finding, Fix, Sources
from kvmend.fingerprint import load_table
from kvmend.judge import judge
from kvmend.locate import Installation, locate_path
from support.toyfix import CACHE, TOYFW, make_fix, probe, site, write_table
from support.toyfw import ENGINE, RELEASES, write_release, write_wheel
from support.verdicts import told_by_files


def at(path: Path) -> Installation:
    installation = locate_path(TOYFW, path)
    assert installation is not None
    return installation


def known(root: Path, **changes: Any) -> Fix:
    """A fix with a table of every release of ToyFW."""
    fix = make_fix(**changes)
    return dataclasses.replace(fix, fingerprints=write_table(root, fix))


def raising(sources: Sources) -> Finding:
    raise RuntimeError("somebody probes")


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_has_the_verdict_that_its_source_has(root: Path, release: str) -> None:
    """Catches a table whose words, features or facts are not those that the probe finds in the same files."""
    fix = known(root)
    write_release(root, release)
    assert told_by_files(fix, at(root))
    assert judge(fix, at(root), by_files=True).known_as == (release,)


def test_known_files_are_neither_parsed_nor_probed(root: Path) -> None:
    fix = dataclasses.replace(known(root), probe=raising)
    write_release(root)
    assert judge(fix, at(root), by_files=True).state == AFFECTED
    assert judge(fix, at(root)).state == UNKNOWN


def test_a_wheel_has_the_digest_of_what_is_installed_from_it(root: Path, tmp_path: Path) -> None:
    fix = known(root)
    assert told_by_files(fix, at(write_wheel(tmp_path)))


def a_remark(file: Path) -> None:
    file.write_text(file.read_text(encoding="utf-8") + "# a remark\n", encoding="utf-8")


def other_line_ends(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))


def another_token(file: Path) -> None:
    file.write_text(ENGINE.replace("lookups += 1", "lookups += 2"), encoding="utf-8")


def gone(file: Path) -> None:
    file.unlink()


def a_folder_in_its_place(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("change", [a_remark, other_line_ends, another_token, gone, a_folder_in_its_place])
def test_any_other_file_is_judged_by_its_source(root: Path, change: Callable[[Path], None]) -> None:
    """Catches a digest that some change leaves as it was, or that takes what cannot be read for absent."""
    fix = known(root)
    change(write_release(root) / "engine.py")
    quick = judge(fix, at(root), by_files=True)
    assert quick == judge(fix, at(root))
    assert (quick.state == AFFECTED) == (change in (a_remark, other_line_ends))


def test_a_file_that_a_release_lacks_must_be_lacking(root: Path) -> None:
    fix = make_fix(site("Engine.lookup"), site("flush", "toyfw.later"))
    fix = dataclasses.replace(fix, fingerprints=write_table(root, fix))
    package = write_release(root)
    assert told_by_files(fix, at(root))
    (package / "later.py").write_text("x = 1\n", encoding="utf-8")
    assert not told_by_files(fix, at(root))


def test_a_table_of_other_bodies_than_the_fix_s_own_is_not_asked(root: Path) -> None:
    """Catches a fix that reads more than it did when its table was made, and an old table that waves it through."""
    fix = known(root)
    write_release(root)
    wider = dataclasses.replace(fix, sites=(*fix.sites, site("Engine.size")))
    assert judge(wider, at(root), by_files=True) == judge(wider, at(root))
    assert judge(wider, at(root), by_files=True).state == UNKNOWN


def looks_elsewhere(sources: Sources) -> Finding:
    assert sources.text(CACHE) is not None
    return probe(sources)


def with_a_tuple(sources: Sources) -> Finding:
    return Finding(state=AFFECTED, reason="the lookup counts", facts={"lines": (1, 2)})


def does_not_know(sources: Sources) -> Finding:
    return Finding(state=UNKNOWN, reason="who knows")


@pytest.mark.parametrize("asked", [looks_elsewhere, with_a_tuple, does_not_know])
def test_a_finding_that_the_bodies_files_do_not_tell_gets_no_digest(
    root: Path, asked: Callable[[Sources], Finding]
) -> None:
    """Catches verdicts by files of a probe that read further files, or whose facts JSON would change."""
    fix = known(root, probe=asked)
    assert not any(generation.files for generation in load_table(fix.fingerprints).generations)
    write_release(root)
    assert judge(fix, at(root), by_files=True) == judge(fix, at(root))


def test_of_two_releases_with_the_same_bodies_and_other_facts_only_one_is_judged_by_its_files(root: Path) -> None:
    """Catches one release's line number in the facts of another."""
    from kvmend.cli.fingerprint import add

    fix = known(root)
    write_release(root, changes={"engine": f"# moved down\n{ENGINE}"})
    table = add(load_table(fix.fingerprints), fix, "1.0.1", at(root))
    (both,) = [generation for generation in table.generations if "1.0" in generation.releases]
    assert (both.releases, list(both.files), both.facts) == (("1.0", "1.0.1"), ["1.0.1"], {"line": 11})


def test_a_table_without_digests_is_a_table(root: Path) -> None:
    fix = known(root)
    file = root / "toytables" / f"{fix.id}.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    for generation in data["generations"]:
        for name in ("files", "facts", "reason"):
            del generation[name]
    file.write_text(json.dumps(data), encoding="utf-8")
    write_release(root)
    assert judge(fix, at(root), by_files=True) == judge(fix, at(root))
