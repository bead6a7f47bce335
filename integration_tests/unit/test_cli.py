"""The command line: list, explain and fingerprint, and how errors end; each as a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvmend import __version__, cli, registry
from kvmend.fingerprint import parse_table
from support.interpreter import kvmend
from support.toyfw import register_fix, write_release, write_wheel

# list, explain ------------------------------------------------------------------------------------------------------


def test_list_names_every_fix_with_its_switch(toy: Path) -> None:
    done = kvmend("list", path=[toy])
    assert (done.code, done.stderr) == (0, "")
    assert "toy-count  ToyFW 1.0 - 1.1  KVMEND_TOY_COUNT\n  Lookups are counted once." in done.stdout
    assert "vllm-prefix-stats  vLLM 0.8.5 – 0.26.0  KVMEND_VLLM_PREFIX_STATS" in done.stdout


def test_list_says_which_fix_could_not_be_loaded_and_lists_the_others(toy: Path) -> None:
    register_fix(toy, "1 / 0", name="toy-broken", dist="broken-fixes")
    done = kvmend("list", path=[toy])
    assert (
        done.stderr
        == "kvmend: fix toy-broken of broken-fixes could not be loaded: ZeroDivisionError: division by zero\n"
    )
    assert "toy-count" in done.stdout


def test_explain_says_why_how_when_to_remove_and_what_is_touched(toy: Path) -> None:
    done = kvmend("explain", "toy-count", path=[toy])
    assert (done.code, done.stderr) == (0, "")
    for expected in (
        "toy-count - Lookups are counted once.", "switch KVMEND_TOY_COUNT = 1|0|force", "Trigger: any lookup.",
        "It wraps the lookup.",
        "ToyFW is 2.0 or later.", "toyfw.engine:Engine.lookup", "toyfw.engine:Engine.admit", "calls: calls seen", "https://example.org/toyfw/1",
    ):  # fmt: skip
        assert expected in done.stdout


def test_every_shipped_fix_can_be_explained() -> None:
    for fix in registry.discover()[0]:
        done = kvmend("explain", fix.id)
        assert (done.code, done.stderr) == (0, "")
        assert fix.switch in done.stdout


# fingerprint --------------------------------------------------------------------------------------------------------


def test_fingerprint_makes_and_extends_a_table_from_wheels_and_folders(
    toy: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("releases")
    table = place / "table.json"
    write_release(place / "tree", "1.0", dist=None)
    arguments = ("fingerprint", "toy-count", str(write_wheel(place, "2.0")), str(write_wheel(place, "1.0")))
    done = kvmend(*arguments, "--merge", str(table), path=[toy])
    assert (done.code, done.stdout.splitlines()[-1]) == (0, f"{table}: 2 releases, 2 different sources")
    plain = kvmend("fingerprint", "toy-count", str(place / "toyfw-2.0-py3-none-any.whl"), path=[toy])
    assert [each.releases for each in parse_table(plain.stdout, "standard output").generations] == [("2.0",)]
    done = kvmend("fingerprint", "toy-count", f"develop={place / 'tree'}", "--merge", str(table), path=[toy])
    assert done.code == 0
    generations = parse_table(table.read_text(encoding="utf-8"), "table").generations
    assert [(each.releases, each.state) for each in generations] == [
        (("1.0", "develop"), "affected"),
        (("2.0",), "fixed"),
    ]


@pytest.mark.parametrize("place", ["folder", "dangling/table.json", "latin.json"])
def test_a_table_that_cannot_be_read_or_written_is_one_line_and_is_left_as_it_is(
    toy: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    (toy / "folder").mkdir()
    (toy / "latin.json").write_bytes(b"\xe9")
    write_release(toy)
    into = toy / place
    assert cli.run(["fingerprint", "toy-count", str(toy), "--merge", str(into)]) == 2
    output, error = capsys.readouterr()
    assert (output, error.count("\n")) == ("", 1)
    assert error.startswith(f"kvmend: --merge {into}: cannot be ")
    assert (toy / "latin.json").read_bytes() == b"\xe9"
    assert not list(toy.glob(".*.new"))


# Errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["explain", "nope"], 2, "no fix 'nope'; there are: "),
        (["explain"], 2, "Missing argument 'FIX'. See kvmend explain --help."),
        (["check", "--path", "/no/where"], 2, "/no/where: no such file or folder"),
        (["check", "--path", "{toy}"], 2, "{toy}: none of the packages "),
        (["check", "--path", "{toy}/toy_fixes.py"], 2, "{toy}/toy_fixes.py: not a wheel (File is not a zip file)"),
        (["check", "--path"], 2, "Option '--path' requires an argument."),
        (["check", "--nope"], 2, "No such option"),
        (["check", "spare"], 2, "Got unexpected extra argument"),
        (["nope"], 2, "No such command 'nope'."),
        (["verify", "nope"], 2, "no fix 'nope'"),
        (["demo", "toy-count"], 2, "toy-count has no demo"),
        (["fingerprint", "toy-count"], 2, "Missing argument"),
        (["fingerprint", "toy-count", "{toy}/none.whl"], 2, "{toy}/none.whl: no such file or folder"),
        (["fingerprint", "toy-count", "{toy}"], 2, "{toy}: no package 'toyfw' in it"),
    ],
)
def test_an_error_is_one_line_that_says_what_is_wrong(
    toy: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert cli.run([argument.format(toy=toy) for argument in arguments]) == code
    output, error = capsys.readouterr()
    assert (output, error.count("\n")) == ("", 1)
    assert error.startswith("kvmend: " + message.format(toy=toy))


def test_an_error_in_a_process_of_its_own_is_the_same_line_and_exit_code(toy: Path) -> None:
    done = kvmend("check", "--path", "/no/where", path=[toy])
    assert (done.code, done.stdout, done.stderr) == (2, "", "kvmend: /no/where: no such file or folder\n")


def test_a_defect_of_ours_is_one_line_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def defect(package: str | None = None) -> Any:
        raise RuntimeError("line one\nline two")

    monkeypatch.setattr(registry, "discover", defect)
    assert cli.run(["list"]) == 1
    assert capsys.readouterr().err == "kvmend: internal error: RuntimeError: line one line two\n"


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(package: str | None = None) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "discover", interrupt)
    assert cli.run(["list"]) == 130
    assert capsys.readouterr().err.strip() == "kvmend: interrupted"


def test_without_a_command_the_help_is_shown() -> None:
    done = kvmend()
    assert done.stdout.startswith("Usage: kvmend [OPTIONS] COMMAND")
    assert "Traceback" not in done.stderr


def test_the_version_is_that_of_the_package() -> None:
    assert kvmend("--version").stdout.strip() == f"kvmend, version {__version__}"
