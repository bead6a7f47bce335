"""Which process is which: pids are used again, and containers have their own."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvmend import process
from kvmend.process import own, runs
from support.reporting import until

#: A program that waits to be ended.
WAITING = [sys.executable, "-S", "-c", "print(flush=True); input()"]


def process_of(pid: int) -> process.Process:
    """A process of this machine as it would report itself."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return dataclasses.replace(own(), pid=pid, birth=int(fields[19]))


def test_a_process_knows_itself_and_sees_itself_run() -> None:
    assert (own().pid, own().host) == (os.getpid(), os.uname().nodename)
    assert own() == process_of(os.getpid())
    assert runs(own()) is True


def test_a_pid_that_was_given_to_another_process_is_not_taken_for_the_first() -> None:
    assert runs(dataclasses.replace(own(), birth=own().birth - 1)) is False


def test_a_process_that_ended_does_not_run_and_one_nobody_has_waited_for_neither() -> None:
    with subprocess.Popen(WAITING, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        theirs = process_of(child.pid)
        assert runs(theirs) is True
        child.send_signal(signal.SIGKILL)
        assert until(lambda: runs(theirs) is False)  # a zombie from here on
    assert runs(theirs) is False


@pytest.mark.parametrize("change", [{"boot": "another"}, {"namespace": "pid:[1]"}, {"boot": ""}, {"namespace": ""}])
def test_nothing_is_said_of_a_process_of_another_boot_or_pid_namespace(change: dict[str, str]) -> None:
    assert runs(dataclasses.replace(own(), **change)) is None  # type: ignore[arg-type]


def test_without_proc_a_process_still_has_a_name_of_its_own_and_nothing_is_said_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "_own", None)
    monkeypatch.setattr(process, "_text", lambda path: "")
    assert (own().pid, own().boot, own().namespace) == (os.getpid(), "", "")
    assert runs(own()) is None
    monkeypatch.setattr(process, "_own", None)


def test_a_process_that_proc_hides_is_not_declared_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with /proc mounted with hidepid, for a server of another user."""
    mine = own()
    monkeypatch.setattr(process, "_stat", lambda pid: None)
    assert runs(mine) is None
    assert runs(dataclasses.replace(mine, pid=2**22 + 1)) is False


def test_the_same_pid_in_two_containers_two_boots_or_two_lives_makes_three_file_names() -> None:
    changes = [{}, {"namespace": "pid:[2]"}, {"boot": "other"}, {"birth": own().birth + 1}, {"host": "other"}]
    names = {dataclasses.replace(own(), pid=1, **change).file_name for change in changes}  # type: ignore[arg-type]
    assert len(names) == len(changes)


@pytest.mark.parametrize("host", ["../../etc", "a b/c", "", "h" * 300, "g\u00fcnther", "bad\udcff"])
def test_any_host_name_makes_a_plain_file_name(host: str) -> None:
    name = dataclasses.replace(own(), host=host).file_name
    assert name.isascii()
    assert "/" not in name
    assert len(name) < 128
    assert name.startswith("kvmend-")
