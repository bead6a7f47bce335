"""The runner of the documentation's commands finds what is broken: each test is a page that somebody has spoilt."""

from __future__ import annotations

import os
import textwrap
import time
from pathlib import Path

import doc_known
import doc_sandbox
import pytest
from doc_pages import blocks, command_lines, matches, steps
from doc_sandbox import Failure, Sandbox, run
from test_docs import parsed, to_run

from support.interpreter import ROOT

FENCE = "```"


def failures(tmp_path: Path, text: str) -> list[Failure]:
    """What is wrong with the commands of a page, in an empty folder with the test's own programs."""
    page = ROOT / "docs" / "spoilt.md"
    found = [step for block in blocks(page, textwrap.dedent(text)) if not block.not_run for step in steps(block)]
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    return run(found, Sandbox(folder=tmp_path, environment=environment))


def console(*lines: str) -> str:
    return "\n".join([f"{FENCE}console", *lines, FENCE, ""])


def test_a_page_that_is_right_has_no_failures(tmp_path: Path) -> None:
    text = console("$ x=1", "$ mkdir a && cd a", "$ echo $x \\", ">   2", "1 2") + console("$ basename $PWD", "a")
    assert failures(tmp_path, text) == []


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["$ kvmendd check"], "exit code 127"),
        (["$ false"], "exit code 1"),
        (["$ echo good", "bad"], "it printed something else"),
        (["$ echo good; echo more", "good"], "it printed something else"),
        (["$ true", "anything"], "it printed something else"),
        (["$ false", "$ echo $?", "0"], "it printed something else"),
        (["$ echo 'not closed"], "it did not end"),
    ],
)
def test_a_command_that_fails_or_prints_something_else_is_found(tmp_path: Path, lines: list[str], reason: str) -> None:
    (failure, *_) = failures(tmp_path, console(*lines))
    assert failure.reason.startswith(reason)
    assert failure.step.where.startswith("docs/spoilt.md:")


def test_a_broken_command_does_not_hide_the_next_one(tmp_path: Path) -> None:
    found = failures(tmp_path, console("$ false", "$ echo one", "two"))
    assert [failure.step.command for failure in found] == ["false", "echo one"]


def test_a_command_that_does_not_end_is_ended_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doc_sandbox, "TIMEOUT", 1)
    (failure,) = failures(tmp_path, console("$ sleep 600 & echo $! > pid; wait"))
    assert "did not end" in failure.reason
    started = Path("/proc", (tmp_path / "pid").read_text(encoding="utf-8").strip(), "stat")
    give_up = time.monotonic() + 20
    while started.exists() and started.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < give_up, "it still runs"
        time.sleep(0.05)


def test_a_script_must_end_well(tmp_path: Path) -> None:
    assert failures(tmp_path, f"{FENCE}sh\ncat <<END\nfalse\nEND\n{FENCE}\n") == []
    assert len(failures(tmp_path, f"{FENCE}sh\nfalse\n{FENCE}\n")) == 1


def test_a_block_that_is_marked_is_not_run_and_no_other(tmp_path: Path) -> None:
    marked = "<!-- not run: needs a cluster -->\n" + console("$ false")
    assert failures(tmp_path, marked) == []
    assert len(failures(tmp_path, marked + "\n" + console("$ false"))) == 1


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a … c", "a b c", True),
        ("a … c", "a b d", False),
        ("a\n…\nc", "a\nb\nb\nc", True),
        ("a\n…\nc", "a\nc", True),
        ("a", "a  \n\n", True),
        ("a\nb", "a", False),
        ("4711 gpu7   vLLM  2 s ago", "28 gpu7  vLLM  11 s ago", True),
        ("4711 gpu7  vLLM  running", "28 gpu7  vLLM  dead", False),
    ],
)
def test_outputs_are_compared_line_by_line(shown: str, printed: str, same: bool) -> None:
    assert matches(shown, printed) is same


@pytest.mark.parametrize("line", ["kvmend chekc", "kvmend check --paths x", "kvmend explain", "kvmend check --path"])
def test_a_command_line_that_kvmend_does_not_take_is_found(line: str) -> None:
    with pytest.raises(Exception, match=r"No such|no command|Missing|requires"):
        parsed(line)


def test_command_lines_are_found_in_blocks_that_are_not_run_and_in_prose(tmp_path: Path) -> None:
    page = ROOT / "docs" / "how-to" / "kubernetes.md"
    assert {line for _, line in command_lines(page)} >= {"kvmend status"}
    assert "kvmend check" in {line for _, line in command_lines(ROOT / "README.md")}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("kvmend: KVMEND_X is no switch of kvmend; misspelt?", True),
        ("kvmend: KVMEND_X is not a switch of kvmend", False),
        ("kvmend: vllm-prefix-stats applied [vLLM 0.26.0]: source is that of 0.26.0; …", True),
        ("kvmend: vllm-prefix-stats mended [vLLM 0.26.0]: source is that of 0.26.0; …", False),
        ("kvmend: vllm-prefix-stats applied [vLLM 0.26.0]: this source is well known", False),
        ("kvmend.errors.StrictError: KVMEND_STRICT=1: vllm-prefix-stats is conflict: …", True),
        ("kvmend.errors.StrictError: KVMEND_STRICT=1 was set, and it is not so", False),
    ],
)
def test_a_message_that_nobody_says_is_found(line: str, said: bool) -> None:
    assert doc_known.is_said(line) is said


def test_every_page_with_commands_is_run() -> None:
    assert len([page for page in (ROOT / "docs").rglob("*.md") if to_run(page)]) >= 7
