"""Reports: one per process, complete or absent, true in a forked child, and never in the server's way."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvmend import applier, report
from kvmend.journal import JOURNAL
from support.interpreter import clean_environment, run
from support.reporting import REPORT_SCHEMA, reports
from support.toyfix import ENGINE, make_fix
from support.toyfw import register_fix, write_release

_LOAD = "from kvmend import freshener, loading, report\nloading.apply_all('toyfw')\nimport toyfw.engine\n"


@pytest.fixture
def toy(root: Path) -> Path:
    write_release(root)
    register_fix(root)
    return root


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(REPORT_SCHEMA)


def test_a_report_says_what_is_in_place_and_how_often_it_was_used(root: Path) -> None:
    write_release(root)
    module = __import__(ENGINE, fromlist=["Engine"])
    applier.apply(make_fix())
    for _ in range(3):
        module.Engine().lookup("a")
    data = report.snapshot()
    jsonschema.validate(data, REPORT_SCHEMA)
    assert (data["pid"], data["parent_pid"], data["forked_from"]) == (os.getpid(), os.getppid(), JOURNAL.parent)
    assert data["fixes"] == [
        {
            "fix": "toy-count", "outcome": "applied", "reason": "the lookup counts", "mode": "1", "framework": "ToyFW",
            "version": "1.0", "sites": ["toyfw.engine:Engine.lookup"], "known_as": [], "shadowed_by": [],
            "inherited": False, "counters": {"calls": 3}, "derived": [],
        }
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("release", "env", "outcome"),
    [
        ("1.0", {}, "applied"),
        ("2.0", {}, "already_fixed"),
        ("3.0", {}, "not_affected"),
        ("1.0", {"KVMEND": "0"}, "disabled"),
        ("1.0", {"KVMEND_TOY_COUNT": "x"}, "failed"),
        ("1.0", {"KVMEND_STRICT": "x"}, "failed"),
    ],
)
def test_every_outcome_is_in_the_report_of_its_process(
    root: Path, release: str, env: dict[str, str], outcome: str
) -> None:
    write_release(root, release)
    register_fix(root)
    run(_LOAD, path=[root], env=env | {"KVMEND_STATE_DIR": str(root / "state")})
    (data,) = reports(root / "state").values()
    assert [(fix["fix"], fix["outcome"]) for fix in data["fixes"]] == [("toy-count", outcome)]


def test_without_a_folder_nothing_is_written_and_no_thread_is_started(toy: Path) -> None:
    found = run(_LOAD + "import threading\nanswer([report.write(), threading.active_count()])", path=[toy]).value
    assert found == [None, 1]


def test_the_folder_is_made_and_the_report_is_complete_at_exit(toy: Path) -> None:
    state = toy / "a" / "b"
    run(_LOAD + "toyfw.engine.Engine().lookup('a')", path=[toy], env={"KVMEND_STATE_DIR": str(state)})
    (data,) = reports(state).values()
    assert data["fixes"][0]["counters"] == {"calls": 1}
    assert data["started"] <= data["written"]
    assert data["ended"] == data["written"]
    assert len(list(state.iterdir())) == 1


@pytest.mark.parametrize("place", ["/proc", "/proc/nowhere", "file", "file/below"])
def test_a_folder_that_cannot_be_written_never_hurts_and_is_said_once(toy: Path, place: str) -> None:
    (toy / "file").touch()
    folder = str(toy / place)  # an absolute place stays what it is
    code = _LOAD + "[report.write() for _ in range(5)]\nfreshener.publish()\nanswer(toyfw.engine.Engine().lookup('a'))"
    done = run(code, path=[toy], env={"KVMEND_STATE_DIR": folder})
    assert done.value == "found a +kvmend"
    said = [line for line in done.stderr.splitlines() if line]
    assert len(said) == 1
    assert said[0].startswith(f"kvmend: report not written to {folder}: ")


def test_a_report_is_replaced_as_a_whole_and_leaves_nothing_else_behind(
    toy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVMEND_STATE_DIR", str(toy))
    path = report.write()
    assert path is not None
    before = Path(path).read_text(encoding="utf-8")

    plain = os.write

    def half(handle: int, content: Any) -> int:
        if len(content) < 300:
            raise OSError(28, "No space left on device")
        return plain(handle, content[: len(content) // 2])

    monkeypatch.setattr(os, "write", half)
    assert report.write() is None
    monkeypatch.undo()
    assert Path(path).read_text(encoding="utf-8") == before
    assert not list(toy.glob(".kvmend-*"))
    assert "No space left on device" in caplog.text


def test_readers_of_a_report_that_is_rewritten_all_the_time_see_only_whole_ones(toy: Path) -> None:
    state, enough = toy / "state", toy / "enough"
    code = _LOAD + f"import os\nwhile not os.path.exists({str(enough)!r}):\n    report.write()\n"
    environment = clean_environment({"KVMEND_STATE_DIR": str(state)}, [toy])
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as writer:
        seen, give_up = 0, time.monotonic() + 60
        while seen <= 100 and writer.poll() is None and time.monotonic() < give_up:
            seen += len(reports(state))
        enough.touch()
    assert seen > 100
    assert writer.returncode == 0


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_report_can_be_read_by_whom_the_umask_lets(toy: Path, mask: int) -> None:
    """Catches reports that only the server's own user can read."""
    run(f"import os\nos.umask({mask})\n" + _LOAD, path=[toy], env={"KVMEND_STATE_DIR": str(toy / "state")})
    (file,) = (toy / "state").iterdir()
    assert file.stat().st_mode & 0o777 == 0o666 & ~mask


def test_secrets_of_the_command_line_stay_out_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["serve", "--api-key", "s3cret", "--hf_token=s3cret", "--max-tokens", "7", "--ssl-keyfile", "k.pem"]
    monkeypatch.setattr("sys.argv", words)
    shown = ["serve", "--api-key", "***", "--hf_token=***", "--max-tokens", "7", "--ssl-keyfile", "k.pem"]
    assert report.snapshot()["command"] == shown


def test_a_computed_counter_is_never_below_zero_and_a_broken_one_costs_only_itself(
    root: Path,
) -> None:
    write_release(root)
    __import__(ENGINE)
    applier.apply(make_fix(counters={"calls": "calls", "left": "left", "odd": "odd"}, may_fall=("left",)))
    counters = JOURNAL.entries["toy-count"].counters
    counters.derive("left", lambda now: now["calls"] - 1)
    counters.derive("odd", lambda _: 1 // 0)
    (fix,) = report.snapshot()["fixes"]
    assert (fix["counters"], fix["derived"]) == ({"calls": 0, "left": 0, "odd": 0}, ["left"])


def test_a_relative_folder_is_where_the_process_was_when_it_loaded_kvmend(toy: Path) -> None:
    (toy / "work").mkdir()
    (toy / "elsewhere").mkdir()
    code = f"import os\nos.chdir({str(toy / 'work')!r})\n" + _LOAD + f"os.chdir({str(toy / 'elsewhere')!r})\n"
    code += "import subprocess, sys\nchild = 'from kvmend import loading; loading.load(\"toyfw\")'\n"
    code += "subprocess.run([sys.executable, '-c', child])\n"
    run(code, path=[toy], env={"KVMEND_STATE_DIR": "state"})
    assert len(reports(toy / "work" / "state")) == 2
    assert list((toy / "elsewhere").iterdir()) == []


def test_a_tilde_is_the_home_folder_and_without_one_there_are_no_reports_and_it_is_said_once(toy: Path) -> None:
    run(_LOAD, path=[toy], env={"KVMEND_STATE_DIR": "~/state", "HOME": str(toy)})
    assert len(reports(toy / "state")) == 1
    code = _LOAD + "loading.apply_all('toyfw')\nanswer([report.write(), toyfw.engine.Engine().lookup('a')])"
    done = run(code, path=[toy], env={"KVMEND_STATE_DIR": "~nobody-at-all/state"})
    assert done.value == [None, "found a +kvmend"]
    assert done.stderr.count("KVMEND_STATE_DIR='~nobody-at-all/state' is not allowed") == 1


# Fork and spawn -----------------------------------------------------------------------------------------------------

_FORK = """
import os, json
from kvmend import applier
engine = toyfw.engine.Engine()
engine.lookup("a")
pid = os.fork()
if pid == 0:
    engine.lookup("a"), engine.lookup("a")
    again = loading.apply_all("toyfw")
    report.write()
    os._exit(0)
os.waitpid(pid, 0)
answer([os.getpid(), pid, report.snapshot()])
"""


def test_a_forked_child_reports_for_itself_and_says_what_it_inherited(toy: Path) -> None:
    parent, child, own = run(_LOAD + _FORK, path=[toy], env={"KVMEND_STATE_DIR": str(toy / "state")}).value
    found = reports(toy / "state")
    assert set(found) == {parent, child}
    assert (found[child]["parent_pid"], found[child]["forked_from"], found[parent]["forked_from"]) == (
        parent,
        parent,
        None,
    )
    (theirs,), (ours,) = found[child]["fixes"], own["fixes"]
    assert (theirs["outcome"], theirs["inherited"], theirs["counters"]) == ("applied", True, {"calls": 2})
    assert (ours["outcome"], ours["inherited"], ours["counters"]) == ("applied", False, {"calls": 1})


def test_a_child_forked_while_another_thread_holds_the_journal_is_not_stuck(toy: Path) -> None:
    code = """
        import os, threading, time
        from kvmend.journal import JOURNAL
        held, free = threading.Event(), threading.Event()
        def hold():
            with JOURNAL.lock:
                held.set()
                free.wait(30)
        threading.Thread(target=hold, daemon=True).start()
        held.wait()
        pid = os.fork()
        if pid == 0:
            report.snapshot()
            os._exit(7)
        for _ in range(300):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            time.sleep(0.05)
        else:
            os.kill(pid, 9)
        free.set()
        answer(os.waitstatus_to_exitcode(status) if done else "stuck")
    """
    code = _LOAD + "\n".join(line.removeprefix("        ") for line in code.splitlines())
    assert run(code, path=[toy]).value == 7


def test_a_fix_armed_before_a_fork_is_applied_in_the_child_at_its_own_import(toy: Path) -> None:
    code = """
        import os
        from kvmend import loading, report
        loading.apply_all("toyfw")
        pid = os.fork()
        if pid == 0:
            import toyfw.engine
            toyfw.engine.Engine().lookup("a")
            report.write()
            os._exit(0)
        os.waitpid(pid, 0)
        report.write()
        answer([os.getpid(), pid])
    """
    parent, child = run(code, path=[toy], env={"KVMEND_STATE_DIR": str(toy / "state")}).value
    found = reports(toy / "state")
    assert [found[each]["fixes"][0]["outcome"] for each in (parent, child)] == ["armed", "applied"]
    assert found[child]["fixes"][0]["counters"] == {"calls": 1}


def test_a_spawned_child_starts_afresh(toy: Path) -> None:
    code = """
        import json, multiprocessing, os, sys
        from support.spawned import load_and_report
        place = os.environ["TOY_ANSWER"] + ".child"
        child = multiprocessing.get_context("spawn").Process(target=load_and_report, args=(place,))
        child.start()
        child.join()
        answer([os.getpid(), child.pid, json.load(open(place))])
    """
    code = (
        _LOAD
        + "toyfw.engine.Engine().lookup('a')\n"
        + "\n".join(line.removeprefix("        ") for line in code.splitlines())
    )
    parent, child, data = run(code, path=[toy]).value
    jsonschema.validate(data, REPORT_SCHEMA)
    assert (data["pid"], data["parent_pid"], data["forked_from"]) == (child, parent, None)
    assert [(fix["inherited"], fix["counters"]) for fix in data["fixes"]] == [(False, {"calls": 1})]
