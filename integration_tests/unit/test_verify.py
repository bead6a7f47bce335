"""`kvmend verify`: before and after, each in a process of its own, whatever happens there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvmend.cli import verify
from support.interpreter import INTEGRATION_TESTS, kvmend
from support.toyfix import make_fix
from support.toyfw import register_fix, write_module, write_release

PROOF = "from kvmend.api import Case\ndef measure():\n    "


def verified(root: Path, *arguments: str, **env: str) -> tuple[int, dict[str, Any]]:
    """Exit code and the toy fix's row of `kvmend verify toy-count --json`."""
    done = kvmend("verify", "toy-count", "--json", *arguments, path=[root], env=env)
    assert "Traceback" not in done.stderr
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
    assert (code, row["ok"], row["verdict"], row["outcome"], row["version"]) == (0, True, "mended", "applied", "1.0")
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


def test_a_framework_that_is_not_installed_shows_nothing_and_is_no_failure(root: Path) -> None:
    proof(root, "return []", release=None)
    code, row = verified(root)
    assert (code, row["verdict"], row["reason"]) == (0, "not shown", "ToyFW is not installed here")


def test_a_fix_without_a_proof_says_so(root: Path) -> None:
    write_release(root)
    register_fix(root)
    code, row = verified(root)
    assert (code, row["verdict"], row["reason"]) == (0, "not shown", "this fix ships no proof")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise RuntimeError('no engine here')", "the measuring process ended with 1: RuntimeError: no engine here"),
        ("import os; os._exit(3)", "the measuring process ended with 3: no output"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "the measuring process ended with -11: "),
        ("return [1]", "the measuring process ended with 1: TypeError"),
    ],
)
def test_a_measurement_that_crashes_is_a_failure_with_its_last_words(root: Path, body: str, reason: str) -> None:
    proof(root, body)
    code, row = verified(root)
    assert (code, row["ok"], row["verdict"]) == (1, False, "not shown")
    assert row["reason"].startswith(reason)


def test_proofs_that_do_not_show_the_same_cases_twice_are_a_failure(root: Path) -> None:
    proof(
        root, "import os; return [Case(name='x', expected=1, measured=1)] * (1 + int(os.environ['KVMEND_TOY_COUNT']))"
    )
    code, row = verified(root)
    assert (code, row["verdict"]) == (1, "not shown")
    assert row["reason"] == "the proof gave 1 cases without the fix and 2 others with it"


def test_a_measurement_that_does_not_end_is_ended(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof(root, "import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", f"{root}:{INTEGRATION_TESTS}")
    monkeypatch.setattr(verify, "TIMEOUT", 1)
    row = verify._verify(make_fix(proof="toy_proof"))
    assert (row["ok"], row["reason"]) == (False, "no answer within 1 s")


def test_a_measurement_is_not_stopped_by_strict_and_leaves_no_report(root: Path) -> None:
    proof(root, "return [Case(name='fine', expected=1, measured=1)]", "1.0")
    state = root / "state"
    code, _ = verified(root, KVMEND_STRICT="1", KVMEND_STATE_DIR=str(state), KVMEND="0")
    assert (code, state.exists()) == (0, False)


def test_what_a_framework_prints_does_not_spoil_the_answer(root: Path) -> None:
    proof(
        root,
        "import sys; print('{'); print('loud', file=sys.stderr); return [Case(name='fine', expected=1, measured=1)]",
    )
    assert verified(root)[0] == 0
