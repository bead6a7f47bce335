"""`kvmend status --prometheus`: what a scraper is given, read back with Prometheus's own parser."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvmend.cli.exposition import expose
from kvmend.cli.gathering import Folder, Seen, gather
from kvmend.process import own
from support.interpreter import clean_environment, kvmend
from support.reporting import one_fix, until, write_report

ELSEWHERE = dataclasses.replace(own(), boot="another", host="gpu8", pid=7)
LABELS = {"host": "gpu8", "pid": "7", "process": ELSEWHERE.id}


def scraped(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Series to value, by metric; no series comes twice."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            series, labels = found.setdefault(sample.name, {}), tuple(sorted(sample.labels.items()))
            assert labels not in series
            series[labels] = sample.value
    return found


def value(text: str, metric: str, **labels: str) -> float:
    return scraped(text)[metric][tuple(sorted(labels.items()))]


def test_every_figure_is_there_under_the_process_that_it_belongs_to(tmp_path: Path) -> None:
    fix = one_fix(counters={"held": 2**60, "dropped": 4}, derived=["dropped"], shadowed_by=["a.b", "c.d"])
    role = {"name": "worker", "rank": 3, "node": "prefill"}
    write_report(tmp_path, fix, process=ELSEWHERE, role=role, written=time.time() - 5, started=1000.5)
    text = kvmend("status", "--prometheus", "--state-dir", str(tmp_path)).stdout
    assert value(text, "kvmend_process_up", **LABELS) == 1
    info = {"framework": "ToyFW", "version": "1.0", "role": "worker", "rank": "3", "node": "prefill", "kvmend": "0.1.0"}
    assert value(text, "kvmend_process_info", **LABELS, **info, state="running") == 1
    assert value(text, "kvmend_process_start_time_seconds", **LABELS) == 1000.5
    assert 5 <= value(text, "kvmend_report_age_seconds", **LABELS) < 60
    assert value(text, "kvmend_fix_outcome", **LABELS, fix="toy-count", outcome="applied", mode="1") == 1
    assert value(text, "kvmend_fix_ok", **LABELS, fix="toy-count") == 0
    assert value(text, "kvmend_fix_shadowed", **LABELS, fix="toy-count") == 2
    assert value(text, "kvmend_fix_events_total", **LABELS, fix="toy-count", counter="held") == 2**60
    assert value(text, "kvmend_fix_derived", **LABELS, fix="toy-count", counter="dropped") == 4
    assert value(text, "kvmend_processes", state="running") == 1
    assert value(text, "kvmend_status_ok") == 0
    assert f" {2**60}\n" in text  # not rounded on the way out


def test_what_may_fall_is_no_counter(tmp_path: Path) -> None:
    write_report(tmp_path, one_fix(counters={"held": 1, "dropped": 4}, derived=["dropped"]))
    kinds = {each.name: each.type for each in text_string_to_metric_families(expose(gather(str(tmp_path))))}
    assert (kinds["kvmend_fix_events"], kinds["kvmend_fix_derived"]) == ("counter", "gauge")
    (series,) = scraped(expose(gather(str(tmp_path))))["kvmend_fix_events_total"]
    assert ("counter", "held") in series


def test_after_a_restart_with_the_same_pid_the_counters_are_new_series_and_the_old_ones_keep_their_value(
    tmp_path: Path,
) -> None:
    """Catches a counter that falls within a series, which a container's pid 1 would make at every restart."""
    write_report(tmp_path, one_fix(counters={"calls": 900}), process=ELSEWHERE)
    before = scraped(expose(gather(str(tmp_path))))["kvmend_fix_events_total"]
    write_report(tmp_path, one_fix(counters={"calls": 2}), process=dataclasses.replace(ELSEWHERE, birth=1))
    after = scraped(expose(gather(str(tmp_path))))["kvmend_fix_events_total"]
    assert all(after[series] >= count for series, count in before.items())
    assert sorted(after.values()) == [2, 900]


def test_the_gone_are_down_and_an_empty_folder_says_that_nobody_is_there(tmp_path: Path) -> None:
    text = expose(gather(str(tmp_path)))
    assert (value(text, "kvmend_processes", state="running"), value(text, "kvmend_status_ok")) == (0, 0)
    write_report(tmp_path, process=ELSEWHERE, ended=time.time())
    (tmp_path / "kvmend-bad.json").touch()
    text = expose(gather(str(tmp_path)))
    assert value(text, "kvmend_process_up", **LABELS) == 0
    assert value(text, "kvmend_unreadable_reports") == 1


names = st.text(max_size=20)


@given(names, names, names, st.integers(min_value=0, max_value=2**53))
def test_whatever_the_names_are_the_text_can_be_scraped_and_gives_them_back(
    host: str, version: str, counter: str, count: int
) -> None:
    report: dict[str, Any] = {
        "host": host, "pid": 1, "process": "0", "kvmend": "0.1.0", "started": 1.0, "written": 2.0,
        "role": {"name": "", "rank": None, "node": ""}, "fixes": [one_fix(version=version, counters={counter: count})],
    }  # fmt: skip
    seen = Seen(file="f", data=report, state="running", age=0.0, inode=1)
    text = expose(Folder(path="/", read=1.0, processes=(seen,), unreadable=()))
    shown = text.encode("utf-8").decode("utf-8")
    ((labels, found),) = scraped(shown)["kvmend_fix_events_total"].items()
    assert (dict(labels)["host"], dict(labels)["counter"], found) == (host, counter, float(count))


def test_a_name_that_is_no_utf8_is_replaced() -> None:
    report: dict[str, Any] = {
        "host": "h\udcff", "pid": 1, "process": "0", "kvmend": "0.1.0", "started": 1.0, "written": 2.0,
        "role": {"name": "", "rank": None, "node": ""}, "fixes": [],
    }  # fmt: skip
    seen = Seen(file="f", data=report, state="dead", age=0.0, inode=1)
    expose(Folder(path="/", read=1.0, processes=(seen,), unreadable=())).encode("utf-8")


# A file for node_exporter -------------------------------------------------------------------------------------------


def test_output_is_put_in_place_whole_readable_for_others_and_the_exit_code_is_the_same(tmp_path: Path) -> None:
    state, out = tmp_path / "state", tmp_path / "out"
    out.mkdir()
    write_report(state, process=ELSEWHERE)
    done = kvmend("status", "--prometheus", "--output", str(out / "kvmend.prom"), "--state-dir", str(state))
    assert (done.code, done.stdout, done.stderr) == (0, "", "")
    (file,) = out.iterdir()
    assert file.stat().st_mode & 0o044 == 0o044
    assert value(file.read_text(encoding="utf-8"), "kvmend_status_ok") == 1
    write_report(state, one_fix("failed"), process=ELSEWHERE)
    assert kvmend("status", "--prometheus", "--output", "kvmend.prom", "--state-dir", str(state), cwd=out).code == 1
    assert value(file.read_text(encoding="utf-8"), "kvmend_status_ok") == 0


def test_an_output_that_cannot_be_written_is_one_line_and_leaves_what_was_there(tmp_path: Path) -> None:
    write_report(tmp_path, process=ELSEWHERE)
    done = kvmend("status", "--prometheus", "--output", "/nowhere/kvmend.prom", "--state-dir", str(tmp_path))
    assert (done.code, done.stderr) == (
        2,
        "kvmend: /nowhere/kvmend.prom cannot be written: No such file or directory\n",
    )
    (tmp_path / "folder.prom").mkdir()
    done = kvmend("status", "--prometheus", "--output", str(tmp_path / "folder.prom"), "--state-dir", str(tmp_path))
    assert (done.code, done.stderr) == (2, f"kvmend: {tmp_path}/folder.prom cannot be written: Is a directory\n")
    assert not list(tmp_path.glob(".folder*"))


def test_watch_keeps_the_file_fresh_until_it_is_interrupted(tmp_path: Path) -> None:
    state, file = tmp_path / "state", tmp_path / "kvmend.prom"
    write_report(state, process=ELSEWHERE)
    command = ["status", "--state-dir", str(state), "--prometheus", "--output", str(file), "--watch", "0.1"]
    with subprocess.Popen([sys.executable, "-m", "kvmend", *command], env=clean_environment()) as keeper:
        until(file.exists)
        write_report(state, one_fix("failed"), process=ELSEWHERE)
        until(lambda: value(file.read_text(encoding="utf-8"), "kvmend_status_ok") == 0)
        keeper.send_signal(signal.SIGINT)
        assert keeper.wait(30) == 1


@pytest.mark.parametrize("folder", ["state with spaces", "z\u00fcrich"])
def test_any_folder_name_will_do(tmp_path: Path, folder: str) -> None:
    write_report(tmp_path / folder, process=ELSEWHERE)
    assert kvmend("status", "--state-dir", str(tmp_path / folder)).code == 0
