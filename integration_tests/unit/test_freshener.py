"""When reports are written: soon, seldom, as a sign of life, and by short-lived children not at all."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmend import applier, freshener, report, voice
from kvmend.journal import JOURNAL
from support.interpreter import run
from support.reporting import reports, until
from support.toyfix import ENGINE, make_fix
from support.toyfw import register_fix, write_module, write_release

_LOAD = """
import json, os, time
from pathlib import Path
from support.reporting import reports, until
from kvmend import freshener, loading, report
freshener.INTERVAL = freshener.SPACING = 0.02
report.HEARTBEAT = 1000  # what is written is written because something changed
STATE = Path(os.environ["KVMEND_STATE_DIR"])
loading.load("toyfw")
import toyfw.engine
engine = toyfw.engine.Engine()
def applied():
    report = reports(STATE).get(os.getpid())
    return report and [fix["outcome"] for fix in report["fixes"]] == ["applied"]
until(applied)  # nothing moves any more, so nothing is being written
"""
#: The log on standard output, in some format.
_LOG = "import logging, sys\nlogging.basicConfig(level='INFO', stream=sys.stdout, format='{}')\n"


@pytest.fixture
def toy(root: Path) -> Path:
    write_release(root)
    register_fix(root)
    return root


def loaded(toy: Path, code: str, before: str = "", fails: bool = False, **env: str) -> Any:
    """Runs code in a process that has loaded kvmend, looks at itself all the time and has its first report."""
    return run(before + _LOAD + code, path=[toy], env={"KVMEND_STATE_DIR": str(toy / "state")} | env, fails=fails)


@pytest.fixture
def written(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[float, bool]]]:
    """When reports of this process were written, and whether as its last word; `toy-count` is applied."""
    times: list[tuple[float, bool]] = []

    def note(*, ended: bool = False) -> None:
        times.append((time.monotonic(), ended))

    write_release(root)
    __import__(ENGINE)
    applier.apply(make_fix())
    monkeypatch.setenv("KVMEND_STATE_DIR", str(root / "state"))
    monkeypatch.setattr(report, "write", note)
    yield times
    freshener.finish()


def bump() -> None:
    JOURNAL.entries["toy-count"].counters.calls += 1


def test_counters_that_move_are_written_while_the_process_runs(toy: Path) -> None:
    code = """
engine.lookup("a")
until(lambda: reports(STATE)[os.getpid()]["fixes"][0]["counters"] == {"calls": 1})
"""
    loaded(toy, code)


def test_however_often_something_changes_there_is_at_most_one_report_in_the_spacing(
    written: list[tuple[float, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freshener, "INTERVAL", 0.01)
    monkeypatch.setattr(freshener, "SPACING", 0.2)
    freshener.publish()
    end = time.monotonic() + 1.1
    while time.monotonic() < end:
        bump()
        freshener.publish()
        time.sleep(0.001)
    times = [when for when, _ in written]
    assert 2 <= len(times) <= 6
    assert all(later - earlier >= 0.19 for earlier, later in itertools.pairwise(times))


def test_nothing_is_written_on_the_thread_that_loads_or_serves(
    toy: Path,
) -> None:
    """Catches an import or a scheduling step that waits for a disk."""
    code = """
import threading
plain, threads = report.write, []
def note(**options):
    threads.append(threading.current_thread().name)
    return plain(**options)
report.write = note
engine.lookup("a")
loading.load("toyfw")
until(lambda: threads)
freshener.finish()
answer(sorted(set(threads)))
"""
    assert loaded(toy, code).value == ["kvmend-report"]


def test_a_process_in_which_nothing_moves_gives_a_sign_of_life_within_a_heartbeat(
    written: list[tuple[float, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freshener, "INTERVAL", 0.05)
    monkeypatch.setattr(freshener, "SPACING", 0.0)
    monkeypatch.setattr(report, "HEARTBEAT", 0.3)
    freshener.publish()
    until(lambda: len(written) >= 4)
    assert written[3][0] - written[0][0] >= 3 * 0.24  # no more often than the heartbeat asks


def test_a_process_that_ends_in_order_says_so_and_one_that_is_killed_cannot(toy: Path) -> None:
    loaded(toy, "")
    (ended,) = reports(toy / "state").values()
    assert ended["ended"] is not None
    loaded(toy, "os._exit(3)", fails=True)
    (killed,) = [each for pid, each in reports(toy / "state").items() if pid != ended["pid"]]
    assert killed["ended"] is None


def test_a_disk_that_hangs_holds_up_the_end_of_a_process_no_longer_than_the_patience(
    written: list[tuple[float, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = []

    def hang(*, ended: bool = False) -> None:
        written.append((time.monotonic(), ended))
        until(lambda: free)

    monkeypatch.setattr(report, "write", hang)
    monkeypatch.setattr(freshener, "PATIENCE", 0.1)
    freshener.publish()
    until(lambda: written)
    before = time.monotonic()
    freshener.finish()
    assert time.monotonic() - before < 10
    free.append(True)


def test_a_look_that_fails_is_not_the_last(written: list[tuple[float, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, failures = applier.results, []

    def failing() -> Any:
        failures.append(True)
        if len(failures) < 3:
            raise RuntimeError("odd objects in place")
        return plain()

    monkeypatch.setattr(applier, "results", failing)
    monkeypatch.setattr(freshener, "INTERVAL", 0.02)
    monkeypatch.setattr(freshener, "SPACING", 0.0)
    freshener.publish()
    until(lambda: written)


def test_a_thread_that_cannot_be_had_costs_the_reports_and_nothing_else(toy: Path) -> None:
    code = """
import threading
def refuse(self):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refuse
from kvmend import loading
loading.load("toyfw")
import toyfw.engine
answer(toyfw.engine.Engine().lookup("a"))
"""
    done = run(code, path=[toy], env={"KVMEND_STATE_DIR": str(toy / "state")})
    assert (done.value, done.stderr) == ("found a +kvmend", "kvmend: no reports: can't start new thread\n")


def test_the_folder_may_vanish_or_become_a_file_and_reports_go_on_when_it_is_back(toy: Path) -> None:
    code = """
import shutil
shutil.rmtree(STATE)
STATE.touch()
engine.lookup("a")
until(lambda: "not written" in open(os.environ["LOG"]).read())
for _ in range(3):
    engine.lookup("a")
    time.sleep(0.1)
STATE.unlink()
engine.lookup("a")
until(applied)
"""
    log = toy / "log"
    before = f"import logging\nlogging.basicConfig(filename={str(log)!r}, format='%(name)s %(message)s')\n"
    loaded(toy, code, before, LOG=str(log))
    (data,) = reports(toy / "state").values()
    assert data["fixes"][0]["counters"] == {"calls": 5}
    lines = log.read_text(encoding="utf-8").splitlines()
    assert lines == [f"toyfw.kvmend kvmend: report not written to {toy / 'state'}: Not a directory"] or lines == [
        f"toyfw.kvmend kvmend: report not written to {toy / 'state'}: File exists"
    ]


# A fix that is displaced while the server runs ----------------------------------------------------------------------

_DISPLACED = """
import foreign
conflict = until(lambda: [f for f in reports(STATE)[os.getpid()]["fixes"] if f["outcome"] == "conflict"])
toyfw.engine.Engine.lookup = foreign.ours
until(lambda: [f for f in reports(STATE)[os.getpid()]["fixes"] if f["outcome"] == "applied"])
answer(conflict[0]["reason"])
"""
_FOREIGN = """
from toyfw.engine import Engine
ours = Engine.lookup
def lookup(self, request):
    return "foreign alone"
Engine.lookup = lookup
"""


@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_plugin_that_replaces_a_wrapper_later_is_named_in_report_and_log_and_so_is_the_end_of_it(
    toy: Path, strict: str
) -> None:
    """Catches a report that says `applied` for ever. Strict guards the start; it kills no server that serves."""
    write_module(toy, "foreign", _FOREIGN)
    before = _LOG.format("%(levelname)s %(message)s")
    done = loaded(toy, _DISPLACED, before, KVMEND_STRICT=strict)
    reason = "toyfw.engine:Engine.lookup was replaced by foreign.lookup, which does not call kvmend's wrapper"
    assert done.value == reason
    assert done.stdout.splitlines() == [
        "INFO kvmend: toy-count applied [ToyFW 1.0]: the lookup counts",
        f"WARNING kvmend: toy-count conflict [ToyFW 1.0]: {reason}",
        "INFO kvmend: toy-count applied [ToyFW 1.0]: the lookup counts",
    ]


# Forked children ----------------------------------------------------------------------------------------------------


def forked(toy: Path, child: str, after: str = "") -> tuple[dict[int, Any], list[int], str]:
    """Reports, [parent, child] and log of a process that forks once after kvmend was loaded."""
    code = f"""
pid = os.fork()
if pid == 0:
    try:
{child}
    finally:
        os._exit(0)
os.waitpid(pid, 0)
{after}
answer([os.getpid(), pid])
"""
    before = _LOG.format("%(process)d %(message)s")
    done = loaded(toy, code, before)
    return reports(toy / "state"), done.value, done.stdout


def test_a_child_that_ends_before_anything_happened_in_it_leaves_nothing(toy: Path) -> None:
    found, (parent, _), _ = forked(toy, "        time.sleep(0.2)\n        freshener.finish()")
    assert set(found) == {parent}


def test_a_child_whose_counters_move_reports_for_itself_and_logs_nothing_of_what_it_inherited(toy: Path) -> None:
    body = """
        engine.lookup("a")
        until(lambda: os.getpid() in reports(STATE))
    """
    found, (parent, child), log = forked(toy, body)
    assert set(found) == {parent, child}
    (fix,) = found[child]["fixes"]
    assert (fix["inherited"], fix["counters"], found[child]["forked_from"]) == (True, {"calls": 1}, parent)
    assert found[child]["started"] > found[parent]["started"]
    assert found[child]["process"] != found[parent]["process"]
    assert [line.split()[0] for line in log.splitlines()] == [str(parent)]


def test_a_child_in_which_a_fix_is_displaced_reports_for_itself(toy: Path) -> None:
    body = """
        toyfw.engine.Engine.lookup = lambda self, request: "other"
        until(lambda: os.getpid() in reports(STATE))
    """
    found, (_, child), _ = forked(toy, body)
    assert found[child]["fixes"][0]["outcome"] == "conflict"


def test_a_child_that_lives_for_about_a_heartbeat_reports_although_nothing_moved(toy: Path) -> None:
    body = """
        report.HEARTBEAT = 0.1
        until(lambda: os.getpid() in reports(STATE))
    """
    found, (_, child), _ = forked(toy, body)
    assert found[child]["fixes"][0]["counters"] == {"calls": 0}


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_of_multiprocessing_that_ends_in_order_says_so(toy: Path, method: str) -> None:
    """Catches workers that end as they should and are reported as dead: a forked one runs no exit functions."""
    code = f"""
import multiprocessing
from support.spawned import load_and_count
if __name__ == "__main__":
    child = multiprocessing.get_context({method!r}).Process(target=load_and_count)
    child.start()
    child.join()
    assert child.exitcode == 0
    answer(child.pid)
"""
    child = loaded(toy, code).value
    found = reports(toy / "state")[child]
    assert found["ended"] is not None
    assert (found["fixes"][0]["counters"], found["fixes"][0]["inherited"]) == ({"calls": 1}, method == "fork")


# The log ------------------------------------------------------------------------------------------------------------


def test_a_log_handler_that_raises_does_not_take_the_engine_down(toy: Path) -> None:
    before = """
import logging
class Broken(logging.Handler):
    def handle(self, record):
        raise OSError("disk full")
logging.getLogger().addHandler(Broken())
logging.getLogger().setLevel(1)
"""
    code = """
import shutil
toyfw.engine.Engine.lookup = lambda self, request: "other"
until(lambda: reports(STATE)[os.getpid()]["fixes"][0]["outcome"] == "conflict")
shutil.rmtree(STATE)
STATE.touch()
engine.lookup("a")
time.sleep(0.1)
from kvmend import registry
registry.discover = lambda: 1 / 0
loading.load("toyfw")
answer("served")
"""
    done = loaded(toy, code, before)
    assert (done.value, done.stderr) == ("served", "")


def test_what_belongs_to_no_fix_is_said_in_the_framework_s_own_logger(
    toy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches warnings in a logger that a server's configuration shows nobody."""
    from kvmend import loading

    monkeypatch.setattr(voice, "_warned", set())
    monkeypatch.setenv("KVMEND_TOY_CUONT", "0")
    loading.load("toyfw")
    assert [record.name for record in caplog.records if "misspelt" in record.message] == ["toyfw.kvmend"]
