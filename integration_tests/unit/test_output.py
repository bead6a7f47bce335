"""What commands print to pipes, files and terminals."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checks import UNKNOWN

from support.interpreter import clean_environment, kvmend
from support.toyfw import write_release


def run_with(stdout: Any, path: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command line with a standard output that the test has made."""
    return subprocess.run(
        [sys.executable, "-m", "kvmend", *arguments],
        env=clean_environment(env, path=[path]),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    "arguments", [["list"], ["check"], ["check", "--json"], ["explain", "toy-count"], ["--help"], ["hook", "status"]]
)
def test_a_reader_that_goes_away_gets_no_noise_and_the_same_exit_code(toy: Path, arguments: list[str]) -> None:
    write_release(toy, changes=UNKNOWN)
    expected = kvmend(*arguments, path=[toy]).code
    reading, writing = os.pipe()
    os.close(reading)
    done = run_with(writing, toy, *arguments)
    os.close(writing)
    assert (done.returncode, done.stderr) == (expected, "")


def test_a_full_disk_is_one_line(toy: Path) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = run_with(full, toy, "check")
    assert (done.returncode, done.stderr) == (
        2,
        "kvmend: standard output cannot be written: No space left on device\n",
    )


@pytest.mark.parametrize("columns", ["0", "20", "80", ""])
@pytest.mark.parametrize("arguments", [["list"], ["check", "--evidence"], ["explain", "vllm-prefix-stats"]])
def test_what_is_no_terminal_gets_whole_lines_whatever_columns_says(
    toy: Path, arguments: list[str], columns: str
) -> None:
    """Catches output that is empty, wrapped or padded in a log, and a grep that misses because of it."""
    write_release(toy, changes=UNKNOWN)
    lines = kvmend(*arguments, path=[toy], env={"COLUMNS": columns}).stdout.splitlines()
    assert max(map(len, lines)) > 100
    assert [line for line in lines if line != line.rstrip()] == []
    assert lines == kvmend(*arguments, path=[toy]).stdout.splitlines()


def test_a_terminal_of_no_columns_still_gets_something(toy: Path) -> None:
    primary, secondary = pty.openpty()
    done = run_with(secondary, toy, "list", COLUMNS="0", TERM="xterm")
    os.close(secondary)
    assert done.returncode == 0
    assert b"toy-count" in os.read(primary, 100_000)
    os.close(primary)
