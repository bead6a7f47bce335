"""`kvmend status`: who runs, what each fix does there, and what cannot be read, in a table, as JSON, by exit code."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from kvmend import cli, process
from kvmend.cli.gathering import gather
from kvmend.errors import KvmendError, UsageError
from kvmend.process import own
from support.interpreter import clean_environment, kvmend
from support.reporting import one_fix, schema, write_report

SCHEMA = schema("status")
ELSEWHERE = dataclasses.replace(own(), boot="another", host="gpu8", pid=7)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


def status(state: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and data of `kvmend status --json`; the data is valid."""
    result = CliRunner().invoke(
        cli.cli, ["status", "--json", "--state-dir", str(state), *arguments], standalone_mode=False
    )
    if result.exception is not None:
        raise result.exception
    data = json.loads(result.output)
    jsonschema.validate(data, SCHEMA)
    assert data["ok"] is (result.return_value == 0)
    return result.return_value, data


def table(state: Path, *arguments: str, width: int = 200) -> str:
    """What `kvmend status` prints, without colours."""
    result = CliRunner().invoke(
        cli.cli, ["status", "--state-dir", str(state), *arguments], standalone_mode=False, env={"COLUMNS": str(width)}
    )
    assert result.exception is None
    return result.output


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


# Who lives ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "written", "ended", "expected"),
    [
        ({}, 1, None, "running"),
        ({}, 100, None, "silent"),
        ({}, 1, 1.0, "ended"),
        ({"birth": own().birth - 1}, 1, None, "dead"),
        ({"pid": 2**22 + 1}, 1, None, "dead"),
        ({"boot": "another"}, 20, None, "running"),
        ({"boot": "another"}, 100, None, "dead"),
        ({"namespace": "pid:[1]"}, 20, None, "running"),
        ({"namespace": "pid:[1]"}, 100, None, "dead"),
        ({"namespace": "pid:[1]"}, 1, 1.0, "ended"),
        ({"boot": "another"}, -30, None, "running"),
    ],
)
def test_a_process_of_this_machine_is_looked_at_and_one_of_another_is_judged_by_its_age(
    state: Path, change: dict[str, Any], written: float, ended: float | None, expected: str
) -> None:
    """Catches a used-again pid that is taken for the server, and a container's server that is taken for dead."""
    theirs = dataclasses.replace(own(), **change)
    write_report(state, process=theirs, written=time.time() - written, ended=ended)
    _, data = status(state)
    (found,) = data["processes"]
    assert found["state"] == expected
    assert found["age"] == pytest.approx(max(0, written), abs=30)
    assert data["counts"] == {name: int(name == expected) for name in ("running", "silent", "ended", "dead")}


def test_those_that_live_come_first_whatever_their_host_is_called(state: Path) -> None:
    write_report(state, process=ELSEWHERE, ended=time.time())
    write_report(state)
    write_report(state, process=dataclasses.replace(ELSEWHERE, pid=8))
    _, data = status(state)
    assert [found["state"] for found in data["processes"]] == ["running", "running", "ended"]


def test_a_clean_end_and_a_death_are_told_apart_in_the_table_and_neither_makes_the_rest_wrong(state: Path) -> None:
    write_report(state)
    write_report(state, one_fix("conflict"), process=ELSEWHERE, ended=time.time())
    write_report(state, process=dataclasses.replace(own(), birth=1))
    text = table(state)
    assert text.splitlines()[0] == f"{state}: 1 running, 1 ended, 1 dead"
    assert status(state)[0] == 0


# Exit codes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fixes", "code"),
    [
        ([one_fix("applied")], 0),
        ([one_fix("armed")], 0),
        ([one_fix("already_fixed")], 0),
        ([one_fix("not_affected")], 0),
        ([one_fix("disabled")], 0),
        ([one_fix("applied"), one_fix("disabled")], 0),
        ([one_fix("unknown_source")], 1),
        ([one_fix("conflict")], 1),
        ([one_fix("failed")], 1),
        ([one_fix("not_installed")], 1),
        ([one_fix("applied"), one_fix("failed")], 1),
        ([one_fix("applied", shadowed_by=["other.Scheduler.lookup"])], 1),
    ],
)
def test_the_exit_code_says_whether_every_wanted_fix_does_its_job(
    state: Path, fixes: list[dict[str, Any]], code: int
) -> None:
    write_report(state, *fixes)
    found, data = status(state)
    assert (found, data["processes"][0]["ok"]) == (code, code == 0)


def test_one_process_that_is_not_well_among_many_is_found_and_its_reason_is_said(state: Path) -> None:
    for pid in range(100, 110):
        write_report(state, process=dataclasses.replace(ELSEWHERE, pid=pid))
    write_report(state, one_fix("conflict", reason="replaced by other.lookup"), process=ELSEWHERE)
    assert status(state)[0] == 1
    assert "7 gpu8: toy-count conflict: replaced by other.lookup" in table(state).splitlines()


def test_a_shadow_is_said_in_words(state: Path) -> None:
    write_report(state, one_fix(shadowed_by=["other.A.lookup", "other.B.lookup"]), process=ELSEWHERE)
    assert "7 gpu8: toy-count does nothing, shadowed by other.A.lookup, other.B.lookup" in table(state).splitlines()


def test_a_process_that_is_there_but_has_not_reported_for_long_vouches_for_nothing(state: Path) -> None:
    write_report(state, written=time.time() - 3 * 3600)
    assert status(state)[0] == 1
    assert f"{own().pid} {own().host}: its last report is 3 h old" in table(state)


def test_a_process_without_any_fix_is_not_well(state: Path) -> None:
    """Catches a broken installation that looks like a server in which nothing is wrong."""
    write_report(state, process=ELSEWHERE, fixes=[])
    assert status(state)[0] == 1
    assert "7 gpu8: no fix was loaded" in table(state)


@pytest.mark.parametrize("gone", [False, True])
def test_a_folder_in_which_nobody_runs_is_said_clearly_and_is_not_well(state: Path, gone: bool) -> None:
    if gone:
        write_report(state, ended=time.time())
    assert status(state)[0] == 1
    lines = table(state).splitlines()
    assert lines[0] == f"{state}: {'1 ended' if gone else 'no reports'}"
    assert lines[-1] == "no running process reports here: is KVMEND_STATE_DIR set for the server?"


@pytest.mark.parametrize(
    ("arguments", "env", "line"),
    [
        ((), {}, "no folder of reports: set KVMEND_STATE_DIR or use --state-dir"),
        ((), {"KVMEND_STATE_DIR": ""}, "no folder of reports: set KVMEND_STATE_DIR or use --state-dir"),
        (("--state-dir", "/nowhere/at/all"), {}, "/nowhere/at/all cannot be read: No such file or directory"),
        (("--state-dir", "/dev/null"), {}, "/dev/null cannot be read: Not a directory"),
        (("--state-dir", "~nobody-at-all"), {}, "KVMEND_STATE_DIR='~nobody-at-all' is not allowed; allowed: a folder,"),
        (("--json", "--prometheus"), {}, "--json and --prometheus cannot go together"),
        (("--output", "x"), {}, "--output needs --prometheus"),
        (("--json", "--watch"), {}, "--watch shows a table or, with --prometheus and --output, keeps a file"),
        (("--watch", "0"), {}, "Invalid value for '--watch'"),
        (("--watch", "often"), {}, "Invalid value for '--watch'"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: tuple[str, ...], env: dict[str, str], line: str) -> None:
    done = kvmend("status", *arguments, env=env)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kvmend: {line}")
    assert done.stderr.count("\n") == 1


def test_the_folder_comes_from_the_environment_and_the_option_goes_first(state: Path, tmp_path: Path) -> None:
    write_report(state, process=ELSEWHERE)
    (tmp_path / "other").mkdir()
    assert kvmend("status", env={"KVMEND_STATE_DIR": str(state)}).code == 0
    done = kvmend("status", "--state-dir", "other", env={"KVMEND_STATE_DIR": str(state)}, cwd=tmp_path)
    assert (done.code, done.stdout.splitlines()[0]) == (1, f"{tmp_path}/other: no reports")


# What is shown ------------------------------------------------------------------------------------------------------


def test_the_table_shows_process_role_framework_outcome_counters_and_age(state: Path) -> None:
    write_report(
        state,
        one_fix(counters={"held": 81234, "settled": 8012, "dropped": 0}, inherited=True),
        one_fix("disabled", fix="toy-other", counters={}),
        process=ELSEWHERE,
        role={"name": "worker", "rank": 3, "node": "prefill"},
        written=time.time() - 3 * 3600,
        heartbeat=1e6,
    )
    heading, first, second, third, fourth = table(state, width=80).splitlines()[1:6]
    assert heading.split() == ["process", "framework", "state", "outcome", "fix"]
    assert first.split() == ["7", "gpu8", "ToyFW", "1.0", "running", "applied", "toy-count"]
    assert second.split()[:8] == ["worker", "3,", "prefill", "kvmend", "0.1.0", "3", "h", "ago"]
    assert " ".join(second.split()[8:]) == "inherited held 81,234, settled 8,012"
    assert third.split() == ["disabled", "toy-other"]
    assert fourth.split() == ["not", "used", "yet"]


def test_json_has_all_of_it(state: Path) -> None:
    file = write_report(state, one_fix(shadowed_by=["x.y"]), process=ELSEWHERE)
    _, data = status(state)
    assert (data["folder"], data["unreadable"], data["pruned"]) == (str(state), [], [])
    (found,) = data["processes"]
    assert (found["file"], found["host"], found["pid"], found["process"]) == (file.name, "gpu8", 7, ELSEWHERE.id)
    assert (found["framework"], found["version"], found["kvmend"]) == ("ToyFW", "1.0", "0.1.0")
    (fix,) = found["fixes"]
    assert (fix["ok"], fix["outcome"], fix["shadowed_by"], fix["counters"]) == (False, "applied", ["x.y"], {"calls": 3})


def test_what_a_file_says_cannot_steer_the_terminal(state: Path) -> None:
    write_report(state, one_fix("failed", reason="\x1b[2J\x1b]0;owned\x07gone\nsecond line"), process=ELSEWHERE)
    (state / "kvmend-\x1b[31m.json").touch()
    text = table(state)
    assert "\x1b" not in text
    assert "\x07" not in text


# What is no report --------------------------------------------------------------------------------------------------

_WHOLE = json.dumps({"schema": 1, "kvmend": "0.1.0", "fixes": []})
NO_REPORTS = {
    "empty": ("", "empty"),
    "half": (_WHOLE[:20], "not JSON: "),
    "not text": ("\udcff\udcfe{", "not JSON: "),
    "a list": ("[1, 2]", "no report of kvmend"),
    "somebody's": ('{"schema": "https://json-schema.org"}', "no report of kvmend"),
    "a number that is none": ('{"schema": 1, "written": NaN, "fixes": []}', "not JSON: NaN is no number"),
    "newer": ('{"schema": 2, "fixes": []}', "schema 2, this kvmend reads 1; use the newer kvmend"),
    "without a field": (_WHOLE, "process is missing"),
    "deep": ("[" * 100_000, "nested too deeply"),
    "long": ("[" + " " * (1 << 20) + "]", "longer than 1048576 bytes"),
}


@pytest.mark.parametrize("case", NO_REPORTS)
def test_a_file_that_is_no_report_is_named_in_one_line_and_the_others_are_shown(state: Path, case: str) -> None:
    content, reason = NO_REPORTS[case]
    (state / "kvmend-bad.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    write_report(state, process=ELSEWHERE)
    code, data = status(state)
    assert (code, len(data["processes"])) == (1, 1)
    ((name, found),) = [(entry["file"], entry["reason"]) for entry in data["unreadable"]]
    assert name == "kvmend-bad.json"
    assert found.startswith(reason)
    lines = table(state, width=60).splitlines()
    assert [line for line in lines if "kvmend-bad.json" in line] == [f"not a report: kvmend-bad.json: {found}"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pid": "7"}, "pid is '7'"),
        ({"written": None}, "written is None"),
        ({"role": {"name": "x", "rank": "0", "node": ""}}, "role.rank is '0'"),
        ({"fixes": [1]}, "fixes[0] is no object"),
        ({"fixes": [one_fix("mended")]}, "fixes[0].outcome 'mended' is none of applied, armed"),
        ({"fixes": [one_fix(counters={"calls": "many"})]}, "fixes[0].counters has a value that is no integer"),
        ({"fixes": [one_fix(shadowed_by=[{}])]}, "fixes[0] has a name that is no text"),
        ({"fixes": [{"fix": "toy-count"}]}, "fixes[0].outcome is missing"),
    ],
)
def test_a_report_with_a_field_that_is_not_what_it_should_be_is_named_with_it(
    state: Path, change: dict[str, Any], reason: str
) -> None:
    write_report(state, **change)
    ((_, found),) = gather(str(state)).unreadable
    assert found.startswith(reason)


def test_pipes_and_folders_that_are_called_json_hold_nothing_up(state: Path) -> None:
    os.mkfifo(state / "kvmend-pipe.json")
    (state / "folder.json").mkdir()
    (state / "dangling.json").symlink_to("nowhere")
    write_report(state)
    found = dict(gather(str(state)).unreadable)
    assert found == {"kvmend-pipe.json": "not a file", "folder.json": "Is a directory"}


def test_somebody_else_s_json_is_named_and_does_not_make_the_server_wrong(state: Path) -> None:
    write_report(state, process=ELSEWHERE)
    (state / "notes.json").write_text('{"a": 1}', encoding="utf-8")
    (state / "kvmend.prom").write_text("# HELP\n", encoding="utf-8")
    code, data = status(state)
    assert (code, data["unreadable"]) == (0, [{"file": "notes.json", "reason": "no report of kvmend"}])


def test_a_copy_of_a_report_does_not_count_twice(state: Path) -> None:
    file = write_report(state, process=ELSEWHERE)
    (state / "kvmend-copy.json").write_text(
        json.dumps(json.loads(file.read_text(encoding="utf-8")) | {"written": time.time() - 5}), encoding="utf-8"
    )
    code, data = status(state)
    assert (code, len(data["processes"])) == (0, 1)
    assert data["unreadable"] == [{"file": "kvmend-copy.json", "reason": f"the same process as {file.name}"}]


def test_many_files_that_are_no_report_are_counted_not_listed(state: Path) -> None:
    for number in range(30):
        (state / f"other-{number:02}.json").touch()
    lines = table(state).splitlines()
    assert len([line for line in lines if line.startswith("not a report")]) == 10
    assert lines[-1] == "and 20 more files that are no report"


# Prune --------------------------------------------------------------------------------------------------------------


def test_prune_removes_what_the_gone_have_left_and_nothing_else(state: Path) -> None:
    stays = [write_report(state, process=ELSEWHERE), state / "notes.json", state / "kvmend-bad.json", state / "x.tmp"]
    stays.append(state / ".kvmend-new.json.1.tmp")
    for file in stays[1:]:
        file.touch()
    ended = write_report(state, process=dataclasses.replace(ELSEWHERE, pid=8), ended=time.time())
    dead = write_report(state, process=dataclasses.replace(own(), birth=1))
    left = state / ".kvmend-gpu8-9-0.json.9.tmp"
    left.touch()
    os.utime(left, (time.time() - 100,) * 2)
    _, data = status(state, "--prune")
    assert sorted(data["pruned"]) == sorted(file.name for file in (ended, dead, left))
    assert [found["pid"] for found in data["processes"]] == [7]
    assert sorted(state.iterdir()) == sorted(stays)


def test_prune_leaves_a_report_that_was_written_since_it_was_read(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the report of a live server removed, because its disk was full for a minute."""
    file = write_report(state, process=ELSEWHERE, written=time.time() - 1000)
    plain = cli.status.gather  # type: ignore[attr-defined]

    def then_written(path: str) -> Any:
        found = plain(path)
        new = file.with_suffix(".new")
        new.write_bytes(file.read_bytes())
        new.replace(file)
        return found

    monkeypatch.setattr("kvmend.cli.status.gather", then_written)
    assert status(state, "--prune")[1]["pruned"] == []
    assert file.exists()


def test_a_report_that_cannot_be_removed_is_an_error_that_names_it(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_report(state, ended=time.time())

    def refuse(path: str) -> None:
        raise PermissionError(1, "Operation not permitted", path)

    monkeypatch.setattr("kvmend.cli.gathering.os.unlink", refuse)
    with pytest.raises(KvmendError, match=f"^{file} cannot be removed: Operation not permitted$"):
        status(state, "--prune")


# Watch --------------------------------------------------------------------------------------------------------------


def watching(state: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvmend", "status", "--state-dir", str(state), "--watch", "0.1", *arguments],
        env=clean_environment({"COLUMNS": "200"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_watch_shows_what_changes_until_it_is_interrupted_and_ends_with_the_last_answer(state: Path) -> None:
    write_report(state, process=ELSEWHERE)
    with watching(state) as watcher:
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == f"{state}: 1 running\n"
        write_report(state, one_fix("conflict"), process=dataclasses.replace(ELSEWHERE, pid=8))
        for _ in range(2):  # the second time it has certainly taken note of the first
            while watcher.stdout.readline() != f"{state}: 2 running\n":
                pass
        watcher.send_signal(signal.SIGINT)
        _, errors = watcher.communicate(timeout=30)
    assert (watcher.returncode, errors) == (1, "")


def test_watch_ends_with_a_line_when_the_folder_goes_away(state: Path) -> None:
    with watching(state) as watcher:
        assert watcher.stdout is not None
        watcher.stdout.readline()
        state.rmdir()
        _, errors = watcher.communicate(timeout=30)
    assert (watcher.returncode, errors) == (2, f"kvmend: {state} cannot be read: No such file or directory\n")


def test_watch_on_a_terminal_draws_one_table_over_itself(state: Path) -> None:
    write_report(state, process=ELSEWHERE)
    code = (
        "import os, pty, signal, sys, time\n"
        "pid, screen = pty.fork()\n"
        "if pid == 0:\n"
        "    options = ['status', '--state-dir', sys.argv[1], '--watch', '0.1']\n"
        "    os.execv(sys.executable, [sys.executable, '-m', 'kvmend', *options])\n"
        "seen = b''\n"
        "while seen.count(b'toy-count') < 3:\n"
        "    seen += os.read(screen, 65536)\n"
        "os.kill(pid, signal.SIGINT)\n"
        "try:\n"
        "    while os.read(screen, 65536): pass\n"
        "except OSError: pass\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), b'\\x1b[' in seen, b'Traceback' in seen)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(state)],
        env=clean_environment({"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}),
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["0", "True", "False"]


def test_watch_takes_two_seconds_if_none_are_given(monkeypatch: pytest.MonkeyPatch, state: Path) -> None:
    waited: list[float] = []

    def interrupt(seconds: float) -> None:
        waited.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr("kvmend.cli.status.time.sleep", interrupt)
    table(state, "--watch")
    table(state, "--watch", "7.5")
    assert waited == [2.0, 7.5]


def test_a_folder_that_cannot_be_listed_is_a_usage_error(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("kvmend.cli.gathering.os.listdir", refuse)
    with pytest.raises(UsageError, match="cannot be read: Permission denied"):
        gather(str(state))


def test_without_proc_reports_are_judged_by_their_age(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(state)
    monkeypatch.setattr(process, "_own", None)
    monkeypatch.setattr(process, "_text", lambda path: "")
    assert [seen.state for seen in gather(str(state)).processes] == ["running"]
    assert [seen.state for seen in gather(str(state), time.time() + 100).processes] == ["dead"]
    monkeypatch.setattr(process, "_own", None)


def test_status_runs_on_a_terminal_that_knows_ascii_only(state: Path) -> None:
    write_report(
        state, one_fix("failed", reason="0.8.5 – 0.26.0"), process=dataclasses.replace(ELSEWHERE, host="g\u00fcnther")
    )
    env = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    for arguments in ((), ("--json",), ("--prometheus",)):
        done = kvmend("status", "--state-dir", str(state), *arguments, env=env)
        assert (done.code, done.stderr, bool(done.stdout)) == (1, "", True)
