"""Reports: one per process, complete or absent, true in a forked child, and never in the server's way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import kvmend
from kvmend import applier, report
from kvmend.journal import JOURNAL
from support.interpreter import clean_environment, run
from support.toyfix import ENGINE, make_fix
from support.toyfw import register_fix, write_release

SCHEMA = json.loads((Path(kvmend.__file__).parent / "report.schema.json").read_text(encoding="utf-8"))
_LOAD = "from kvmend import loading, report\nloading.apply_all('toyfw')\nimport toyfw.engine\n"


def reports(folder: Path) -> dict[int, Any]:
    """Pid to report, each of them valid."""
    found = {}
    for file in folder.glob("kvmend-*.json"):
        data = json.loads(file.read_text(encoding="utf-8"))
        jsonschema.validate(data, SCHEMA)
        assert file.name == f"kvmend-{data['pid']}.json"
        found[data["pid"]] = data
    return found


@pytest.fixture
def toy(root: Path) -> Path:
    write_release(root)
    register_fix(root)
    return root


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_a_report_says_what_is_in_place_and_how_often_it_was_used(root: Path) -> None:
    write_release(root)
    module = __import__(ENGINE, fromlist=["Engine"])
    applier.apply(make_fix())
    for _ in range(3):
        module.Engine().lookup("a")
    data = report.snapshot()
    jsonschema.validate(data, SCHEMA)
    assert (data["pid"], data["parent_pid"], data["forked_from"]) == (os.getpid(), os.getppid(), JOURNAL.parent)
    assert data["fixes"] == [
        {
            "fix": "toy-count", "outcome": "applied", "reason": "the lookup counts", "mode": "1", "framework": "ToyFW",
            "version": "1.0", "sites": ["toyfw.engine:Engine.lookup"], "known_as": [], "shadowed_by": [],
            "inherited": False, "counters": {"calls": 3},
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
    assert [file.name for file in state.iterdir()] == [f"kvmend-{data['pid']}.json"]


def test_counters_that_move_are_written_while_the_process_runs(toy: Path) -> None:
    code = """
        report.INTERVAL = 0.02
        loading.apply_all("toyfw")
        toyfw.engine.Engine().lookup("a")
        import json, os, time
        place = os.path.join(os.environ["KVMEND_STATE_DIR"], f"kvmend-{os.getpid()}.json")
        for _ in range(500):
            time.sleep(0.02)
            counters = json.load(open(place))["fixes"][0]["counters"]
            if counters["calls"]:
                break
        answer(counters)
    """
    code = (
        "from kvmend import report\nreport.INTERVAL = 0.02\n"
        + _LOAD
        + "\n".join(line.removeprefix("        ") for line in code.splitlines())
    )
    assert run(code, path=[toy], env={"KVMEND_STATE_DIR": str(toy / "state")}).value == {"calls": 1}


@pytest.mark.parametrize("place", ["/proc", "/proc/nowhere", "file", "file/below"])
def test_a_folder_that_cannot_be_written_never_hurts_and_is_said_once(toy: Path, place: str) -> None:
    (toy / "file").touch()
    folder = str(toy / place)  # an absolute place stays what it is
    code = _LOAD + "[report.write() for _ in range(5)]\nreport.publish()\nanswer(toyfw.engine.Engine().lookup('a'))"
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

    def half(data: Any, stream: Any, **options: Any) -> None:
        stream.write('{"half')
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", half)
    assert report.write() is None
    assert Path(path).read_text(encoding="utf-8") == before
    assert not list(toy.glob(".kvmend-*"))
    assert "No space left on device" in caplog.text


def test_readers_of_a_report_that_is_rewritten_all_the_time_see_only_whole_ones(toy: Path) -> None:
    state = toy / "state"
    code = _LOAD + "import time\nend = time.time() + 1\nwhile time.time() < end:\n    report.write()\n"
    environment = clean_environment({"KVMEND_STATE_DIR": str(state)}, [toy])
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as writer:
        seen = 0
        while writer.poll() is None:
            seen += len(reports(state))
    assert seen > 10
    assert writer.returncode == 0


def test_fifty_processes_share_one_folder(toy: Path) -> None:
    environment = clean_environment({"KVMEND_STATE_DIR": str(toy / "state")}, [toy])
    # Ten interpreters that fork four times each: fifty processes, without fifty starts.
    code = (
        _LOAD
        + "import os\nfor _ in range(4):\n    if not os.fork():\n        os._exit(0)\n[os.wait() for _ in range(4)]\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(10)]
    assert [writer.wait(60) for writer in writers] == [0] * 10
    found = reports(toy / "state")
    assert len(found) == 50
    assert {data["fixes"][0]["outcome"] for data in found.values()} == {"applied"}
    assert len(list((toy / "state").iterdir())) == 50


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


def test_a_child_forked_before_it_did_anything_has_counters_at_zero_in_its_report(toy: Path) -> None:
    code = _LOAD + _FORK.replace('    engine.lookup("a"), engine.lookup("a")\n', "").replace("    report.write()\n", "")
    _, child, _ = run(code, path=[toy], env={"KVMEND_STATE_DIR": str(toy / "state")}).value
    assert reports(toy / "state")[child]["fixes"][0]["counters"] == {"calls": 0}


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
    jsonschema.validate(data, SCHEMA)
    assert (data["pid"], data["parent_pid"], data["forked_from"]) == (child, parent, None)
    assert [(fix["inherited"], fix["counters"]) for fix in data["fixes"]] == [(False, {"calls": 1})]
