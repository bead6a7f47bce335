"""`kvmend verify`: before and after, each in a process of its own, whatever happens there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import kvmend as package
from kvmend.cli import verify
from support.interpreter import SOURCES, kvmend
from support.toyfix import make_fix
from support.toyfw import register_fix, write_module, write_release

SCHEMA = json.loads((Path(package.__file__).parent / "verify.schema.json").read_text(encoding="utf-8"))
PROOF = "from kvmend.api import Case\ndef measure():\n    "


def verified(root: Path, *arguments: str, **env: str) -> tuple[int, dict[str, Any]]:
    """Exit code and the toy fix's row of `kvmend verify toy-count --json`."""
    done = kvmend("verify", "toy-count", "--json", *arguments, path=[root], env=env)
    assert "Traceback" not in done.stderr
    jsonschema.validate(done.value, SCHEMA)
    assert done.value["ok"] is (done.code == 0)
    return done.code, done.value["fixes"][0]


def proof(root: Path, body: str, release: str | None = "1.0") -> None:
    if release:
        write_release(root, release)
    write_module(root, "toy_proof", PROOF + body + "\n")
    register_fix(root, 'make_fix(proof="toy_proof")')


def test_a_fix_that_mends_is_shown_before_and_after(root: Path) -> None:
    write_release(root)
    register_fix(root, 'make_fix(proof="support.toyfix")')
    code, row = verified(root)
    assert (code, row["verdict"], row["outcome"], row["version"]) == (0, "mended", "applied", "1.0")
    assert (row["kept_out"], row["switched_off"], row["seconds"] > 0) == ([], None, True)
    case = {
        "case": "a lookup is mended",
        "expected": "found a +kvmend",
        "without": "found a",
        "with": "found a +kvmend",
    }
    assert row["cases"] == [case]


def test_the_table_for_people_has_the_same_figures(root: Path) -> None:
    write_release(root)
    register_fix(root, 'make_fix(proof="support.toyfix")')
    done = kvmend("verify", "toy-count", path=[root])
    assert "toy-count on ToyFW 1.0: mended - the lookup counts" in done.stdout
    assert "found a +kvmend" in done.stdout


def test_a_fix_that_does_not_mend_is_an_exit_code_of_one(root: Path) -> None:
    proof(root, "return [Case(name='never', expected=1, measured=2)]")
    code, row = verified(root)
    assert (code, row["verdict"], row["cases"][0]["with"]) == (1, "NOT mended", 2)


def test_a_framework_that_is_right_by_itself_is_said_to_be(root: Path) -> None:
    proof(root, "return [Case(name='fine', expected=1, measured=1)]", "2.0")
    code, row = verified(root)
    assert (code, row["verdict"], row["outcome"]) == (0, "right without kvmend", "already_fixed")


def test_a_fix_that_was_asked_for_and_cannot_be_shown_is_an_exit_code_of_its_own(root: Path) -> None:
    """Catches a health check that is content although nothing was shown."""
    proof(root, "return []", release=None)
    code, row = verified(root)
    assert (code, row["verdict"], row["reason"]) == (3, "not shown", f"ToyFW is not installed for {sys.executable}")


def rows(*verdicts: tuple[str, bool]) -> list[dict[str, Any]]:
    return [{"verdict": verdict, "location": "x" if here else None, "kept_out": []} for verdict, here in verdicts]


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ([("mended", True), ("not shown", False)], 0),
        ([("right without kvmend", True)], 0),
        ([("mended", True), ("NOT mended", True)], 1),
        ([("NOT mended", True), ("not shown", True)], 1),
        ([("mended", True), ("not shown", True)], 3),
        ([("not shown", False), ("not shown", False)], 3),
    ],
)
def test_without_a_name_the_frameworks_that_are_installed_decide_and_nothing_at_all_is_no_success(
    found: list[tuple[str, bool]], code: int
) -> None:
    assert verify.exit_code(rows(*found), named=False) == code


def test_a_fix_without_a_proof_says_so(root: Path) -> None:
    write_release(root)
    register_fix(root)
    code, row = verified(root)
    assert (code, row["verdict"], row["reason"]) == (3, "not shown", "this fix ships no proof")


def test_a_fault_that_does_not_appear_is_not_called_mended(root: Path) -> None:
    """Catches a proof that proves nothing on this release."""
    proof(root, "import toyfw.engine; return [Case(name='fine', expected=1, measured=1)]", "1.0")
    code, row = verified(root)
    assert (code, row["verdict"], row["outcome"]) == (3, "not shown", "applied")
    reason = "cannot be shown here, because the fault did not appear without the fix (the lookup counts)"
    assert row["reason"] == reason


LISTED = (
    'make_fix(proof="support.toyfix", framework=__import__("dataclasses").replace(TOYFW, '
    'unloadable=lambda environ, sources: ("the list leaves kvmend out",) if "TOY_PLUGINS" in environ else ()))'
)


def test_what_keeps_servers_of_this_environment_from_loading_the_fix_is_said_and_is_a_failure(root: Path) -> None:
    """Catches a proof taken for a statement about the servers: it applies the fix itself, they may not."""
    write_release(root)
    register_fix(root, LISTED)
    code, row = verified(root, TOY_PLUGINS="")
    assert (code, row["verdict"], row["kept_out"]) == (1, "mended", ["the list leaves kvmend out"])
    done = kvmend("verify", "toy-count", path=[root], env={"TOY_PLUGINS": ""})
    assert "But servers of this environment would not have it: the list leaves kvmend out" in done.stdout
    assert verified(root)[0] == 0


@pytest.mark.parametrize("env", [{"KVMEND": "0"}, {"KVMEND_TOY_COUNT": "0"}])
def test_a_fix_that_is_switched_off_here_is_shown_all_the_same_and_the_switch_is_named(
    root: Path, env: dict[str, str]
) -> None:
    write_release(root)
    register_fix(root, 'make_fix(proof="support.toyfix")')
    code, row = verified(root, **env)
    (switch,) = (f"{name}={value}" for name, value in env.items())
    assert (code, row["verdict"], row["switched_off"], row["switch"]) == (0, "mended", switch, "KVMEND_TOY_COUNT=1")


def test_the_switchs_value_of_this_environment_is_the_one_that_is_measured(root: Path) -> None:
    """Catches a verdict on a mode that the servers do not run."""
    body = "import os; return [Case(name='x', expected='eager', measured=os.environ['KVMEND_TOY_COUNT'])]"
    write_release(root)
    write_module(root, "toy_proof", PROOF + body + "\n")
    register_fix(root, 'make_fix(proof="toy_proof", modes=("safe", "eager"))')
    code, row = verified(root, KVMEND_TOY_COUNT="eager")
    assert (code, row["switch"]) == (0, "KVMEND_TOY_COUNT=eager")
    assert [row["cases"][0][name] for name in ("without", "with")] == ["0", "eager"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise RuntimeError('no engine here')", "the measuring process ended with 1: RuntimeError: no engine here"),
        ("import os; os._exit(3)", "the measuring process ended with 3: no output"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "the measuring process ended with -11: "),
        (
            "import atexit; atexit.register(print, 'shut down'); raise RuntimeError('no engine here')",
            "the measuring process ended with 1: RuntimeError: no engine here",
        ),
        ("return [1]", "the measuring process ended with 1: TypeError"),
    ],
)
def test_a_measurement_that_crashes_is_a_failure_with_its_last_words(root: Path, body: str, reason: str) -> None:
    proof(root, body)
    code, row = verified(root)
    assert (code, row["verdict"]) == (3, "not shown")
    assert row["reason"].startswith(f"cannot be shown here, because {reason}")


def test_proofs_that_do_not_show_the_same_cases_twice_are_a_failure(root: Path) -> None:
    proof(
        root, "import os; return [Case(name='x', expected=1, measured=1)] * (1 + int(os.environ['KVMEND_TOY_COUNT']))"
    )
    code, row = verified(root)
    assert (code, row["verdict"]) == (3, "not shown")
    assert row["reason"] == (
        "cannot be shown here, because the proof gave 1 cases without the fix and 2 others with it"
    )


def test_a_measurement_that_does_not_end_is_ended_with_all_that_it_started(root: Path) -> None:
    """Catches engine processes that outlive the command."""
    child = "import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    proof(root, child + f"open({str(root / 'child')!r}, 'w').write(str(c.pid)); import time; time.sleep(600)")
    code, row = verified(root, "--timeout", "20")
    assert (code, row["reason"]) == (
        3,
        "cannot be shown here, because there was no answer within 20 s; --timeout allows more",
    )
    assert ended((root / "child").read_text())


def ended(process: str) -> bool:
    """Whether the process with this number is no more."""
    state = Path("/proc", process, "stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


#: A proof's first lines: which side it is, noted in `root`, and how many were noted once `many` are or time is up.
_NOTED = """import os, pathlib, time
    root, side = pathlib.Path({root!r}), os.environ["KVMEND_TOY_COUNT"]
    (root / f"{{side}}.part").write_text(str(os.getpid()))
    (root / f"{{side}}.part").rename(root / f"{{side}}.side")
    until = time.monotonic() + 60
    while len(list(root.glob("*.side"))) < {many} and time.monotonic() < until:
        time.sleep(0.01)
    """


def measured(root: Path, monkeypatch: pytest.MonkeyPatch, *, room: bool, end: str) -> list[dict[str, Any]]:
    """The answers of a proof that ends so, with or without room for both sides."""
    proof(root, _NOTED.format(root=str(root), many=2 if room else 1) + end)
    monkeypatch.setattr(verify, "room_for_two", lambda _memory: room)
    packages = (root, *SOURCES, Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, packages)))
    return verify._measured(make_fix(proof="toy_proof"), 90, "toy")


@pytest.mark.parametrize(("room", "noted"), [(True, [2, 2]), (False, [1, 2])])
def test_both_sides_are_measured_at_once_where_there_is_room_and_else_one_after_the_other(
    root: Path, monkeypatch: pytest.MonkeyPatch, room: bool, noted: list[int]
) -> None:
    """Catches a verdict that takes twice as long as it need, and two frameworks in a memory that holds one."""
    end = "return [Case(name=side, expected=0, measured=len(list(root.glob('*.side'))))]"
    cases = [answer["cases"][0] for answer in measured(root, monkeypatch, room=room, end=end)]
    assert [(case["name"], case["measured"]) for case in cases] == list(zip("01", noted, strict=True))


def test_a_side_that_fails_ends_the_other(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = "if side == '0': raise RuntimeError('no engine here')\n    time.sleep(600)"
    answers = measured(root, monkeypatch, room=True, end=end)
    assert answers == [{"error": "the measuring process ended with 1: RuntimeError: no engine here"}]
    assert ended((root / "1.side").read_text())


@pytest.mark.parametrize("value", ["0", "-1", "soon"])
def test_a_timeout_that_is_no_time_is_one_line(value: str) -> None:
    done = kvmend("verify", "--timeout", value)
    assert (done.code, done.stderr.count("\n")) == (2, 1)
    assert "--timeout" in done.stderr


def test_a_measurement_is_not_stopped_by_strict_and_leaves_no_report(root: Path) -> None:
    proof(root, "return [Case(name='fine', expected=1, measured=1)]", "2.0")
    state = root / "state"
    code, _ = verified(root, KVMEND_STRICT="1", KVMEND_STATE_DIR=str(state), KVMEND="0")
    assert (code, state.exists()) == (0, False)


def test_what_a_framework_prints_does_not_spoil_the_answer(root: Path) -> None:
    proof(
        root,
        "import sys; print('{'); print('loud', file=sys.stderr); return [Case(name='fine', expected=1, measured=1)]",
        "2.0",
    )
    assert verified(root)[0] == 0
