"""The verdict on source, and what follows from it together with the switches."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvmend.api import AFFECTED, FIXED, NOT_AFFECTED, UNKNOWN, Finding, Fix, Sources
from kvmend.judge import judge, may_force, read_bodies
from kvmend.locate import locate_path
from kvmend.outcome import Outcome
from kvmend.plan import Plan, make_plan
from support.toyfix import CACHE, TOYFW, make_fix, probe, site, write_table
from support.toyfw import ENGINE, write_release

ONE_TOKEN = {"engine": ENGINE.replace("self.lookups += 1", "self.lookups += 2")}
STILL_COUNTS = {"engine": ENGINE.replace('return f"found {request}"', 'return f"found {request!r}"')}


def plan(fix: Fix, root: Path, **environ: str) -> Plan:
    return make_plan(fix, environ=environ, installation=locate_path(TOYFW, root))


def outcome(fix: Fix, root: Path, **environ: str) -> tuple[str, str]:
    result = plan(fix, root, **environ).result
    return str(result.outcome), result.reason


@pytest.fixture
def fix(root: Path) -> Fix:
    bare = make_fix()
    return make_fix(fingerprints=write_table(root, bare))


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("1.0", ("armed", "source is that of 1.0; the lookup counts")),
        ("1.1", ("armed", "source is that of 1.1; the lookup counts")),
        ("2.0", ("already_fixed", "source is that of 2.0; the admission counts")),
        ("3.0", ("not_affected", "source is that of 3.0; nothing is counted")),
    ],
)
def test_a_known_source_has_the_outcome_of_its_release(
    root: Path, fix: Fix, release: str, expected: tuple[str, str]
) -> None:
    write_release(root, release)
    assert outcome(fix, root) == expected
    assert plan(fix, root).result.known_as == (release,)


def test_a_plan_says_what_was_read_and_where(root: Path, fix: Fix) -> None:
    package = write_release(root)
    result = plan(fix, root).result
    assert (result.framework, result.version, result.mode, result.facts) == ("ToyFW", "1.0", "1", {"line": 10})
    assert result.sites == ("toyfw.engine:Engine.lookup",)
    assert [(each.body, each.path, each.line, each.known_as) for each in result.evidence] == [
        ("toyfw.engine:Engine.lookup", f"{package}/engine.py", 10, ("1.0", "1.1")),
        ("toyfw.engine:Engine.admit", f"{package}/engine.py", 15, ("1.0", "3.0")),
    ]


def test_comments_and_docstrings_do_not_make_a_source_unknown(root: Path, fix: Fix) -> None:
    text = ENGINE.replace('"""Counts every lookup."""', '"""Another text."""\n\n        # a local remark')
    write_release(root, changes={"engine": text})
    assert outcome(fix, root)[0] == "armed"


def test_a_source_changed_by_one_token_is_unknown_and_the_place_is_named(root: Path, fix: Fix) -> None:
    write_release(root, changes=ONE_TOKEN)
    name, reason = outcome(fix, root)
    assert name == "unknown_source"
    assert reason == (
        f"toyfw.engine:Engine.lookup ({root}/toyfw/engine.py:10) is that of no known release; "
        "its structure looks not affected: nothing is counted"
    )


def test_a_combination_of_known_bodies_that_no_release_has_is_unknown(root: Path, fix: Fix) -> None:
    mixed = ENGINE.replace(
        "        return len(request) < limit", "        self.admissions += 1\n        return len(request) < limit"
    )
    write_release(root, changes={"engine": mixed})
    name, reason = outcome(fix, root)
    assert name == "unknown_source"
    assert reason == (
        "no release has this combination of bodies: most are those of 1.0, toyfw.engine:Engine.admit "
        f"({root}/toyfw/engine.py:15) is that of 2.0; its structure looks affected: the lookup counts"
    )


@pytest.mark.parametrize(
    ("engine", "extra", "expected"),
    [
        (ENGINE.replace("def admit", "def admitted"), {}, "{root}/toyfw/engine.py has no Engine.admit"),
        (ENGINE, {"cache": "x = 1\n"}, "{root}/toyfw/cache.py has no Cache.get"),
        (ENGINE, {"cache": None}, "{root}/toyfw has no module toyfw.cache, hence no Cache.get"),
    ],
)
def test_a_body_that_is_absent_is_named_with_the_known_source_that_has_it(
    root: Path, engine: str, extra: dict[str, str | None], expected: str
) -> None:
    """Catches a message that says every body is known when one of them is not there at all."""
    fix = make_fix(site("Engine.lookup"), site("Cache.get", CACHE))
    fix = dataclasses.replace(fix, fingerprints=write_table(root, fix))
    package = write_release(root, changes={"engine": engine} | {k: v for k, v in extra.items() if v is not None})
    if extra.get("cache", "") is None:
        (package / "cache.py").unlink()
    name, reason = outcome(fix, root)
    assert name == "unknown_source"
    assert reason.startswith(f"{expected.format(root=root)}, which the nearest known source, that of 1.0, has; ")


def loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def latin(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"Counts", b"\xe9"))


def cut_short(file: Path) -> None:
    file.write_text(file.read_text(encoding="utf-8") + "\nclass Half(\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (loop, "engine.py cannot be read: Too many levels of symbolic links"),
        (latin, "engine.py cannot be read: not UTF-8 (byte "),
        (cut_short, "engine.py is no source that Python 3."),
    ],
)
def test_a_file_that_cannot_be_read_is_unknown_with_the_cause_and_never_not_affected(
    root: Path, fix: Fix, damage: Any, expected: str
) -> None:
    """Catches a probe that takes an unreadable file for a release without the fault."""
    spared = dataclasses.replace(fix, probe=lambda sources: Finding(state=NOT_AFFECTED, reason="has no engine"))
    damage(write_release(root) / "engine.py")
    if damage is cut_short:  # every body of it is found: what surrounds them is no matter
        assert outcome(fix, root)[0] == "armed"
        (root / "toyfw" / "engine.py").write_text("def lookup(:\n", encoding="utf-8")
    for each in (fix, spared):
        name, reason = outcome(each, root)
        assert name == "unknown_source"
        assert expected in reason


@pytest.mark.parametrize("value", ["1", "0", "force"])
def test_force_mends_an_unknown_source_that_the_probe_finds_affected_and_says_so(
    root: Path, fix: Fix, value: str
) -> None:
    write_release(root, changes=STILL_COUNTS)
    name, reason = outcome(fix, root, KVMEND_TOY_COUNT=value)
    assert name == {"1": "unknown_source", "0": "disabled", "force": "armed"}[value]
    assert reason.startswith("FORCED on an unknown source (KVMEND_TOY_COUNT=force)") == (value == "force")


def test_force_does_not_touch_what_the_probe_does_not_find_affected(root: Path, fix: Fix) -> None:
    write_release(root, changes=ONE_TOKEN)
    assert outcome(fix, root, KVMEND_TOY_COUNT="force")[0] == "unknown_source"


def test_force_changes_nothing_on_a_known_source(root: Path, fix: Fix) -> None:
    write_release(root, "2.0")
    assert outcome(fix, root, KVMEND_TOY_COUNT="force")[0] == "already_fixed"
    write_release(root, "1.0")
    assert outcome(fix, root, KVMEND_TOY_COUNT="force") == ("armed", "source is that of 1.0; the lookup counts")


def test_a_probe_that_disagrees_with_the_table_keeps_hands_off(root: Path, fix: Fix) -> None:
    write_release(root, "1.0")
    doubting = dataclasses.replace(fix, probe=lambda sources: Finding(state=FIXED, reason="looks mended"))
    name, reason = outcome(doubting, root)
    assert name == "unknown_source"
    assert reason == "source is that of 1.0, yet the probe reads it as fixed: looks mended"
    other = dataclasses.replace(
        fix, probe=lambda sources: Finding(state=AFFECTED, reason="x", features=frozenset({"new"}))
    )
    assert outcome(other, root)[0] == "unknown_source"


@pytest.mark.parametrize(
    "table", ["toytables:missing.json", "no_such_tables:x.json", "toytables:corrupt.json", "toytables:latin.json"]
)
def test_without_a_readable_table_every_source_is_unknown_and_the_reason_names_it(
    root: Path, fix: Fix, table: str
) -> None:
    (root / "toytables" / "corrupt.json").write_text('{"schema": 1', encoding="utf-8")
    (root / "toytables" / "latin.json").write_bytes(b'{"schema": "\xe9"}')
    write_release(root, "1.0")
    name, reason = outcome(dataclasses.replace(fix, fingerprints=table), root)
    assert name == "unknown_source"
    assert table in reason


def test_a_fix_without_a_table_trusts_its_probe(root: Path) -> None:
    write_release(root, "1.0")
    assert outcome(make_fix(), root) == ("armed", "the lookup counts")
    write_release(root, "2.0")
    assert outcome(make_fix(), root) == ("already_fixed", "the admission counts")


def raises(sources: Sources) -> Finding:
    raise KeyError("surprise")


@pytest.mark.parametrize("odd", [raises, lambda sources: None, lambda sources: "affected", lambda: None])
def test_a_probe_that_fails_or_says_nothing_is_an_unknown_source(root: Path, fix: Fix, odd: Any) -> None:
    write_release(root, "1.0")
    for broken in (make_fix(probe=odd), dataclasses.replace(fix, probe=odd)):
        name, reason = outcome(broken, root, KVMEND_TOY_COUNT="force")
        assert name == "unknown_source"
        assert "the probe failed" in reason


def test_a_framework_that_lacks_every_body_is_what_the_probe_says(root: Path, fix: Fix) -> None:
    write_release(root, changes={"engine": "x = 1\n"})
    assert outcome(fix, root) == ("unknown_source", "there is no lookup or no admission")
    spared = dataclasses.replace(fix, probe=lambda sources: Finding(state=NOT_AFFECTED, reason="has no engine"))
    assert outcome(spared, root) == ("not_affected", "has no engine")


def test_a_site_that_the_source_lacks_keeps_the_whole_fix_off(root: Path) -> None:
    write_release(root)
    name, reason = outcome(make_fix(site("Engine.lookup"), site("Engine.gone")), root)
    assert (name, reason) == (
        "unknown_source",
        "toyfw.engine:Engine.gone is not in the installed source; the lookup counts",
    )


def test_a_mode_that_needs_no_site_here_is_not_affected(root: Path) -> None:
    write_release(root)
    modal = make_fix(site("Engine.lookup", modes=frozenset({"eager"})), modes=("safe", "eager"))
    assert outcome(modal, root) == ("not_affected", "mode safe needs nothing on this source; the lookup counts")
    assert outcome(modal, root, KVMEND_TOY_COUNT="eager")[0] == "armed"


def test_a_bad_value_fails_the_fix_and_counts_as_wanting_it(root: Path) -> None:
    write_release(root)
    bad = plan(make_fix(), root, KVMEND_TOY_COUNT="maybe")
    assert (bad.result.outcome, bad.wanted, bad.sites) == (Outcome.FAILED, True, ())
    assert bad.result.reason == "KVMEND_TOY_COUNT='maybe' is not allowed; allowed: 1, 0, force"


@pytest.mark.parametrize("environ", [{"KVMEND": "0"}, {"KVMEND_TOY_COUNT": "0"}])
def test_a_fix_that_is_off_is_disabled_and_nothing_is_read(root: Path, environ: dict[str, str]) -> None:
    write_release(root)
    off = plan(make_fix(probe=raises), root, **environ)
    assert (off.result.outcome, off.wanted, off.judgement) == (Outcome.DISABLED, False, None)
    assert off.result.reason == "=".join(*environ.items())


def test_a_framework_that_is_not_there_is_not_installed(root: Path) -> None:
    result = make_plan(make_fix()).result
    assert (result.outcome, result.reason) == (Outcome.NOT_INSTALLED, "no package 'toyfw' in this environment")


def test_a_verdict_on_a_missing_body_has_no_fingerprint_and_only_affected_may_be_forced(root: Path) -> None:
    write_release(root)
    installation = locate_path(TOYFW, root)
    assert installation is not None
    fix = make_fix(site("Engine.lookup"), site("nothing", "toyfw.nowhere"))
    assert read_bodies(fix, installation)["toyfw.nowhere:nothing"] is None
    verdict = judge(fix, installation)
    assert (verdict.evidence[1].path, verdict.evidence[1].fingerprint) == (None, None)
    assert may_force(verdict)
    for state in (FIXED, NOT_AFFECTED, UNKNOWN):
        assert not may_force(dataclasses.replace(verdict, probed=state))
    assert probe(installation).state == AFFECTED


def test_every_outcome_has_a_meaning_and_four_are_good() -> None:
    assert len(Outcome) == 9
    assert all(each.meaning.endswith(".") for each in Outcome)
    assert {str(each) for each in Outcome if each.good} == {"applied", "armed", "already_fixed", "not_affected"}
