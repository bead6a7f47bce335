"""Entry functions: they never raise unless strict, and say once what happened."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from kvmend import applier, loading, registry
from kvmend.errors import StrictError
from kvmend.journal import JOURNAL
from kvmend.outcome import Outcome
from support.interpreter import run
from support.toyfix import ENGINE, make_fix
from support.toyfw import ENGINE as ENGINE_TEXT
from support.toyfw import register_fix, write_dist_info, write_release

#: Like a framework's plugin loader, with the log on standard output.
_LOAD = """
import logging, sys
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(levelname)s %(name)s %(message)s")
from kvmend import loading
loading.load("toyfw")
"""
_SAY = """
from kvmend.applier import results
answer({result.fix: [str(result.outcome), result.reason] for result in results()})
"""
_OTHER = (
    'make_fix(site("f", "other.engine"), id="other-count", switch="KVMEND_OTHER", bodies=(), '
    'framework=__import__("dataclasses").replace(TOYFW, package="other"))'
)


def raising(sources: Any) -> Any:
    raise RuntimeError("the probe is broken")


@pytest.fixture
def fixes(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The registered fixes, for tests in this process; `toy-count` on an imported ToyFW 1.0."""
    write_release(root)
    __import__(ENGINE)
    found: list[Any] = [make_fix()]
    monkeypatch.setattr(registry, "discover", lambda package=None: (tuple(found), ()))
    return found


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records if "kvmend" in record.name]


def test_one_log_line_in_the_frameworks_own_logger_says_that_a_fix_is_applied(
    fixes: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    loading.apply_all("toyfw")
    assert [record.name for record in caplog.records] == ["toyfw.kvmend"]
    assert logged(caplog) == [("INFO", "kvmend: toy-count applied [ToyFW 1.0]: the lookup counts")]


def test_loading_twice_changes_nothing_and_says_nothing_more(
    fixes: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    first = loading.apply_all("toyfw")
    assert loading.apply_all("toyfw") == first
    assert len(logged(caplog)) == 1


def test_only_fixes_of_the_framework_that_loads_are_applied(root: Path) -> None:
    write_release(root)
    register_fix(root)
    assert (
        run(
            "from kvmend import loading\nloading.load_vllm()\nloading.load_fastdeploy()\n" + _SAY, path=[root]
        ).value.get("toy-count")
        is None
    )


def test_results_come_in_the_order_of_ids_and_removal_in_the_opposite_one(fixes: list[Any]) -> None:
    fixes.append(make_fix(id="toy-later", switch="KVMEND_TOY_LATER"))
    assert [result.fix for result in loading.apply_all()] == ["toy-count", "toy-later"]
    assert [result.fix for result in loading.remove_all()] == ["toy-later", "toy-count"]
    assert JOURNAL.entries == {}


@pytest.mark.parametrize(
    ("change", "level", "outcome"),
    [
        ({"KVMEND": "0"}, "INFO", "disabled"),
        ({"KVMEND_TOY_COUNT": "maybe"}, "WARNING", "failed"),
        ({}, "WARNING", "unknown_source"),
        ({"KVMEND_TOY_COUNT": "force"}, "WARNING", "applied"),
    ],
)
def test_what_an_operator_must_see_is_a_warning(
    fixes: list[Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    change: dict[str, str],
    level: str,
    outcome: str,
) -> None:
    (root / "toytables").mkdir()
    (root / "toytables" / "__init__.py").touch()
    (root / "toytables" / "t.json").write_text('{"schema": 1, "fix": "toy-count", "generations": []}', encoding="utf-8")
    fixes[:] = [make_fix(fingerprints="toytables:t.json")]
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    caplog.set_level(logging.INFO)
    loading.apply_all()
    ((said, message),) = logged(caplog)
    assert (said, message.split()[2]) == (level, outcome)


# Never raising ------------------------------------------------------------------------------------------------------


def test_a_probe_that_raises_is_an_unknown_source_and_the_server_comes_up(fixes: list[Any]) -> None:
    fixes[:] = [make_fix(probe=raising), make_fix(id="toy-later", switch="KVMEND_TOY_LATER")]
    loading.load("toyfw")
    assert [str(result.outcome) for result in applier.results()] == ["unknown_source", "applied"]


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("'no fix'", "broken_fixes:FIX is no kvmend.api.Fix"),
        ("make_fix(id='bad')", "FixDeclarationError: fix id 'bad'"),
        ("make_fix()", "id toy-count is registered twice"),
    ],
)
def test_a_broken_fix_of_somebody_keeps_no_other_away_and_is_said_once(
    root: Path, expression: str, reason: str
) -> None:
    write_release(root)
    register_fix(root)
    register_fix(root, expression, name="toy-zzz", dist="broken-fixes")
    done = run(_LOAD + _LOAD + "import toyfw.engine\n" + _SAY, path=[root])
    assert done.value["toy-count"][0] == "applied"
    said = [line for line in done.stdout.splitlines() if "could not be loaded" in line]
    assert len(said) == 1
    assert said[0].startswith(f"WARNING toyfw.kvmend kvmend: fix toy-zzz of broken-fixes could not be loaded: {reason}")


def test_a_registration_without_metadata_keeps_no_fix_away(root: Path) -> None:
    write_release(root)
    register_fix(root)
    info = write_dist_info(root, "no-metadata", "1", {"entry_points.txt": "[kvmend.fixes]\nghost = ghost:FIX\n"})
    (info / "METADATA").unlink()
    done = run(_LOAD + "import toyfw.engine\n" + _SAY, path=[root])
    assert done.value["toy-count"][0] == "applied"
    assert "fix ghost of " in done.stdout


def test_a_registration_that_is_not_utf_8_keeps_no_fix_away(root: Path) -> None:
    """Catches a registration that is found to name the group and then cannot be parsed: nothing would be loaded."""
    write_release(root)
    register_fix(root)
    info = write_dist_info(root, "latin", "1", {})
    (info / "entry_points.txt").write_bytes(b"[kvmend.fixes]\n# caf\xe9\nghost = ghost:FIX\n")
    done = run(_LOAD + "import toyfw.engine\n" + _SAY, path=[root])
    assert done.value["toy-count"][0] == "applied"
    assert "could not be loaded" not in done.stdout


def test_a_defect_of_kvmend_itself_is_logged_and_the_server_comes_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def defect(package: str | None = None) -> Any:
        raise OSError("disk on fire")

    monkeypatch.setattr(registry, "discover", defect)
    loading.load_vllm()
    assert [(record.name, record.levelname) for record in caplog.records] == [("vllm.kvmend", "ERROR")]
    monkeypatch.setenv("KVMEND_STRICT", "1")
    with pytest.raises(StrictError, match="KVMEND_STRICT=1: kvmend could not be loaded: OSError"):
        loading.load_vllm()


def test_two_distributions_that_register_the_same_fix_are_one(root: Path) -> None:
    write_release(root)
    register_fix(root)
    write_dist_info(root, "toy-fixes-copy", "1", {"entry_points.txt": "[kvmend.fixes]\ntoy-count = toy_fixes:FIX\n"})
    done = run(_LOAD + "import toyfw.engine\n" + _SAY, path=[root])
    assert (done.value["toy-count"][0], "could not be loaded" in done.stdout) == ("applied", False)


def test_what_is_registered_for_another_framework_is_not_imported_here(root: Path) -> None:
    """Catches processes of one framework that pay for the fixes of the others."""
    write_release(root)
    register_fix(root, group="kvmend.fixes.toyfw")
    register_fix(root, "1 / 0", name="other-count", dist="other-fixes", group="kvmend.fixes.otherfw")
    done = run(_LOAD + "import toyfw.engine, sys\n" + _SAY, path=[root])
    assert (done.value["toy-count"][0], "could not be loaded" in done.stdout) == ("applied", False)


def test_the_switch_of_another_framework_s_fix_is_not_taken_for_a_misspelt_one(root: Path) -> None:
    write_release(root)
    register_fix(root, group="kvmend.fixes.toyfw")
    register_fix(root, _OTHER, name="other-count", dist="other-fixes", group="kvmend.fixes.other")
    done = run(_LOAD + _SAY, path=[root], env={"KVMEND_OTHER": "0", "KVMEND_OTHRE": "0"})
    assert [line for line in done.stdout.splitlines() if "misspelt" in line] == [
        "WARNING toyfw.kvmend kvmend: KVMEND_OTHRE is no switch of kvmend; misspelt?"
    ]


def test_a_fix_in_the_group_of_another_framework_is_named(root: Path) -> None:
    """Catches a fix that no process ever loads, in silence."""
    write_release(root)
    register_fix(root, group="kvmend.fixes.toyfw")
    register_fix(root, _OTHER, name="other-count", dist="other-fixes", group="kvmend.fixes.toyfw")
    done = run(_LOAD + _SAY, path=[root])
    reason = "it is registered in kvmend.fixes.toyfw and is for other"
    assert f"fix other-count of other-fixes could not be loaded: {reason}" in done.stdout


# Strict -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "env", "outcome"),
    [
        ("1.0", {}, "applied"),
        ("2.0", {}, "already_fixed"),
        ("3.0", {}, "not_affected"),
        ("1.0", {"KVMEND_TOY_COUNT": "0"}, "disabled"),
        ("1.0", {"KVMEND": "0"}, "disabled"),
    ],
)
def test_strict_lets_a_process_up_whose_fixes_do_their_job_or_are_not_wanted(
    root: Path, release: str, env: dict[str, str], outcome: str
) -> None:
    write_release(root, release)
    register_fix(root)
    done = run(_LOAD + "import toyfw.engine\n" + _SAY, path=[root], env=env | {"KVMEND_STRICT": "1"})
    assert done.value["toy-count"][0] == outcome


_CASES = {
    "unknown source": ("make_fix(probe=lambda sources: 1 / 0)", "1.0", {}, "toy-count is unknown_source: the probe"),
    "not installed": ("make_fix()", None, {}, "toy-count is not_installed: no package 'toyfw' in this environment"),
    "bad value": ("make_fix()", "1.0", {"KVMEND_TOY_COUNT": "on"}, "toy-count is failed: KVMEND_TOY_COUNT='on' is not"),
    "bad factory": ("make_fix(site('tick', wrap=boom))", "1.0", {}, "toy-count is failed: RuntimeError: the factory"),
    "broken fix": ("1 / 0", "1.0", {}, "fix toy-count of toy-fixes could not be loaded: ZeroDivisionError"),
}  # fmt: skip


@pytest.mark.parametrize("case", _CASES)
def test_strict_stops_the_process_and_the_last_line_says_why(root: Path, case: str) -> None:
    expression, release, env, why = _CASES[case]
    if release:
        write_release(root, release)
    register_fix(root, expression)
    load = _LOAD if release is None or case == "broken fix" else "import toyfw.engine\n" + _LOAD
    done = run(load, path=[root], env=env | {"KVMEND_STRICT": "1"}, fails=True)
    assert done.last_line.startswith(f"kvmend.errors.StrictError: KVMEND_STRICT=1: {why}")


def test_strict_stops_the_import_that_turns_an_armed_fix_into_a_conflict(root: Path) -> None:
    write_release(root, changes={"engine": ENGINE_TEXT + "\n\nEngine.lookup = lambda self, request: 'own'\n"})
    register_fix(root)
    done = run(
        _LOAD + "print('loaded')\nimport toyfw.engine\nprint('not reached')\n",
        path=[root],
        env={"KVMEND_STRICT": "1"},
        fails=True,
    )
    assert done.stdout.splitlines()[-1].endswith("does not call the original")
    assert "loaded" in done.stdout.splitlines()
    assert done.last_line.startswith(
        "kvmend.errors.StrictError: KVMEND_STRICT=1: toy-count is conflict: toyfw.engine:Engine.lookup"
    )


def test_without_strict_the_same_conflict_is_a_warning_and_the_import_goes_on(root: Path) -> None:
    write_release(root, changes={"engine": ENGINE_TEXT + "\n\nEngine.lookup = lambda self, request: 'own'\n"})
    register_fix(root)
    done = run(_LOAD + "import toyfw.engine\n" + _SAY, path=[root])
    assert done.value["toy-count"][0] == "conflict"
    assert (
        "WARNING toyfw.kvmend kvmend: toy-count conflict [ToyFW 1.0]: toyfw.engine:Engine.lookup was replaced"
        in done.stdout
    )


@pytest.mark.parametrize("value", ["", "yes", "true"])
def test_a_value_of_strict_that_cannot_be_read_keeps_every_wanted_fix_off_and_is_said_once(
    fixes: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("KVMEND_STRICT", value)
    fixes.append(make_fix(id="toy-later", switch="KVMEND_TOY_LATER"))
    monkeypatch.setenv("KVMEND_TOY_LATER", "0")
    loading.apply_all()
    refused, off = loading.apply_all()
    assert (refused.outcome, off.outcome) == (Outcome.FAILED, Outcome.DISABLED)
    assert refused.reason == f"KVMEND_STRICT={value!r} is not allowed; allowed: 1, 0"
    assert applier.results() == [refused, off]
    assert len(logged(caplog)) == 1
    monkeypatch.setenv("KVMEND_STRICT", "0")
    assert loading.apply_all()[0].outcome is Outcome.APPLIED


def test_an_armed_fix_says_nothing_until_it_is_settled_and_then_once(root: Path) -> None:
    write_release(root)
    register_fix(root)
    code = _LOAD + "print('armed')\nloading.load('toyfw')\nimport toyfw.engine\nprint('imported')\nimport toyfw.cache\n"
    lines = [line for line in run(code, path=[root]).stdout.splitlines() if "toy-count" in line or " " not in line]
    assert [line for line in lines if not line.startswith("DEBUG")] == [
        "armed",
        "INFO toyfw.kvmend kvmend: toy-count applied [ToyFW 1.0]: the lookup counts",
        "imported",
    ]


def test_the_package_itself_imports_nothing() -> None:
    code = "import sys\nbefore = set(sys.modules)\nimport kvmend\nanswer(sorted(set(sys.modules) - before))"
    assert set(run(code).value) == {"kvmend"}


def test_loading_brings_in_neither_the_command_line_nor_its_libraries() -> None:
    code = "import sys\nfrom kvmend import loading\nloading.apply_all()\nanswer([n.split('.')[0] for n in sys.modules])"
    assert not {"click", "rich", "packaging", "vllm", "torch"} & set(run(code).value)


def test_a_misspelt_switch_is_a_warning_in_every_process_that_reads_it(
    fixes: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMEND_TOY_CUONT", "0")
    monkeypatch.setattr("kvmend.voice._warned", set())
    loading.apply_all("toyfw")
    loading.apply_all("toyfw")
    warnings = [message for level, message in logged(caplog) if level == "WARNING"]
    assert warnings == ["kvmend: KVMEND_TOY_CUONT is no switch of kvmend; misspelt?"]
