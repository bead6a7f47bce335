"""The command line: list, explain, check and fingerprint, each as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

import kvmend as package
from kvmend import __version__, cli, registry
from kvmend.fingerprint import parse_table
from support.interpreter import clean_environment, kvmend, run
from support.toyfix import make_fix, write_table
from support.toyfw import ENGINE, register_fix, write_release, write_wheel

SCHEMA = json.loads((Path(package.__file__).parent / "check.schema.json").read_text(encoding="utf-8"))
WITH_TABLE = 'make_fix(fingerprints="toytables:toy-count.json")'
UNKNOWN = {"engine": ENGINE.replace('f"found {request}"', 'f"found {request!r}"')}


def check(root: Path, *arguments: str, **env: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Exit code, report and the toy fix's row of `kvmend check --json`; the report is valid."""
    result = CliRunner().invoke(cli.cli, ["check", "--json", *arguments], env=env, standalone_mode=False)
    assert result.exception is None
    report = json.loads(result.output)
    jsonschema.validate(report, SCHEMA)
    rows = [row for row in report["fixes"] if row["fix"] == "toy-count"]
    return result.return_value, report, rows[0] if rows else {}


@pytest.fixture
def toy(root: Path) -> Path:
    """A registered toy fix with a table of known sources; no framework yet."""
    write_table(root, make_fix())
    register_fix(root, WITH_TABLE)
    return root


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


# check --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "changes", "env", "forecast", "code"),
    [
        ("1.0", None, {}, "will_apply", 0),
        ("2.0", None, {}, "already_fixed", 0),
        ("3.0", None, {}, "not_affected", 0),
        ("1.0", UNKNOWN, {}, "unknown_source", 1),
        ("1.0", UNKNOWN, {"KVMEND_TOY_COUNT": "force"}, "will_apply", 0),
        ("1.0", UNKNOWN, {"KVMEND_TOY_COUNT": "0"}, "disabled", 0),
        ("1.0", UNKNOWN, {"KVMEND": "0"}, "disabled", 0),
        ("1.0", None, {"KVMEND_TOY_COUNT": "off"}, "failed", 1),
        (None, None, {}, "not_installed", 0),
    ],
)
def test_check_forecasts_each_outcome_and_its_exit_code_says_whether_all_is_well(
    toy: Path, release: str | None, changes: dict[str, str] | None, env: dict[str, str], forecast: str, code: int
) -> None:
    if release:
        write_release(toy, release, changes=changes)
    found, report, row = check(toy, **env)
    assert (row["forecast"], found, report["ok"]) == (forecast, code, not code)


def test_check_reports_what_it_read_in_full(toy: Path) -> None:
    location = write_release(toy)
    _, report, row = check(toy)
    assert (report["kvmend"], report["path"], report["warnings"]) == (__version__, None, [])
    assert (row["location"], row["distributions"]) == (str(location), [{"name": "toyfw", "version": "1.0"}])
    assert (row["known_as"], row["facts"], row["sites"]) == (["1.0"], {"line": 10}, ["toyfw.engine:Engine.lookup"])
    assert row["evidence"][0]["path"] == f"{location}/engine.py"


@pytest.mark.parametrize("form", ["folder", "package", "environment", "wheel"])
def test_check_judges_what_path_names_and_nothing_else(
    toy: Path, tmp_path_factory: pytest.TempPathFactory, form: str
) -> None:
    write_release(toy, "1.0")
    place = tmp_path_factory.mktemp("elsewhere")
    path = {
        "folder": lambda: write_release(place, "2.0").parent,
        "package": lambda: write_release(place, "2.0"),
        "environment": lambda: write_release(place / "lib/python3.12/site-packages", "2.0").parents[3],
        "wheel": lambda: write_wheel(place, "2.0"),
    }[form]()
    code, report, row = check(toy, "--path", str(path))
    assert (code, row["forecast"], row["known_as"], report["path"]) == (0, "already_fixed", ["2.0"], str(path))
    assert [each["fix"] for each in report["fixes"]] == ["toy-count"]


def test_check_warns_of_two_distributions_that_provide_the_framework(toy: Path) -> None:
    write_release(toy, "1.1", dist="toyfw-cpu")
    write_release(toy, "1.0")
    code, _, row = check(toy)
    text = "toyfw 1.0, toyfw-cpu 1.1 all provide toyfw; uninstall all but one"
    assert (code, row["problems"]) == (0, [{"text": text, "fatal": False}])


def test_check_warns_of_variables_that_are_no_switch_and_of_a_bad_strict(toy: Path) -> None:
    write_release(toy)
    _, report, _ = check(toy, KVMEND_TOY_CUONT="0", KVMEND_STRICT="yes")
    assert report["warnings"] == [
        "KVMEND_TOY_CUONT is no switch of kvmend; misspelt?",
        "KVMEND_STRICT='yes' is not allowed; allowed: 1, 0",
    ]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("kvmend", None),
        ("other,kvmend", None),
        ("", "VLLM_PLUGINS='' does not name kvmend: it will not be loaded"),
        ("kvmnd", "VLLM_PLUGINS='kvmnd' does not name kvmend: it will not be loaded"),
        (
            "other, kvmend",
            "VLLM_PLUGINS='other, kvmend' does not name kvmend (spaces are not stripped): it will not be loaded",
        ),
    ],
)
def test_check_finds_that_the_frameworks_plugin_list_leaves_kvmend_out(
    root: Path, value: str, problem: str | None
) -> None:
    write_release(root)
    vllm = '__import__("kvmend_fixes.vllm").vllm.VLLM'
    register_fix(root, f'make_fix(framework=__import__("dataclasses").replace(TOYFW, unloadable={vllm}.unloadable))')
    code, _, row = check(root, VLLM_PLUGINS=value)
    assert (code, row["ok"], [each["text"] for each in row["problems"]]) == (
        int(bool(problem)),
        not problem,
        [problem] if problem else [],
    )


def test_check_for_people_has_verdict_advice_and_evidence(toy: Path) -> None:
    write_release(toy, changes=UNKNOWN)
    done = kvmend("check", "--evidence", path=[toy])
    assert (done.code, done.stderr) == (1, "")
    assert "toyfw 1.0" in done.stdout
    assert "unknown_source" in done.stdout
    assert "toyfw/engine.py:10" in done.stdout
    assert "The installed source is none that this kvmend knows" in done.stdout


_HEAVY = ("torch", "paddle", "vllm", "fastdeploy")


def test_check_and_list_import_no_framework_even_where_they_are_installed(toy: Path) -> None:
    for name in _HEAVY:
        (toy / name).mkdir()
        (toy / name / "__init__.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    write_release(toy)
    code = """
        import sys
        from kvmend.cli import run
        codes = [run(["check", "--json"]), run(["check"]), run(["list"])]
        answer([codes[2], [name for name in sys.modules if name.split(".")[0] in {heavy}]])
    """
    assert run(code.replace("{heavy}", repr((*_HEAVY, "toyfw"))), path=[toy]).value == [0, []]


def test_check_answers_within_half_a_second_of_processor_time(root: Path) -> None:
    # vLLM's own files in size and shape: the bodies that the fix reads, in modules of several thousand lines.
    filler = "".join(
        f"\n\ndef helper_{n}(a, b=None):\n    '''Text {n}.'''\n    return [a, b, '{n}'] if b else f'{{a}}'\n"
        for n in range(900)
    )
    (fix,) = [fix for fix in registry.discover()[0] if fix.id == "vllm-prefix-stats"]
    (root / "vllm").mkdir()
    (root / "vllm" / "__init__.py").touch()
    for module in {body.module for body in fix.read}:
        names = sorted({body.qualname.split(".")[0] for body in fix.read if body.module == module})
        methods = {
            name: [
                b.qualname.split(".")[1] for b in fix.read if b.module == module and b.qualname.startswith(f"{name}.")
            ]
            for name in names
        }
        text = filler
        for name in names:
            text += f"\n\nclass {name}:\n    x = 1\n" + "".join(
                f"\n    def {each}(self):\n        return self\n" for each in methods[name]
            )
        file = root / (module.replace(".", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + filler, encoding="utf-8")
    spent = []
    for _ in range(5):
        child = subprocess.Popen(
            [sys.executable, "-m", "kvmend", "check", "--json"],
            env=clean_environment(path=[root]),
            stdout=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 1  # that source is no release of vLLM
        spent.append(usage.ru_utime + usage.ru_stime)
    assert min(spent) < 0.5, spent


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


@pytest.mark.parametrize("arguments", [["list"], ["check"], ["check", "--json"], ["explain", "toy-count"]])
def test_a_reader_that_goes_away_gets_no_traceback(toy: Path, arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "kvmend", *arguments],
        env=clean_environment(path=[toy]),
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    os.close(writing)
    assert done.stderr == ""
