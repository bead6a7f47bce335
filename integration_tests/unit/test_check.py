"""`kvmend check`: the forecast, and what keeps kvmend from being loaded."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from checks import UNKNOWN, check

from kvmend import __version__, registry
from kvmend.api import AFFECTED, Finding
from kvmend.cli.check import examine
from kvmend.locate import locate_path
from support.interpreter import clean_environment, kvmend, run
from support.toyfix import site
from support.toyfw import register_fix, write_release, write_wheel


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
    found, report, row = check(**env)
    assert (row["forecast"], found, report["ok"]) == (forecast, code, not code)


def test_check_reports_what_it_read_in_full(toy: Path) -> None:
    location = write_release(toy)
    _, report, row = check()
    assert (report["kvmend"], report["path"], report["problems"]) == (__version__, None, [])
    assert (report["python"], report["environment"], report["hook"]["state"]) == (sys.executable, True, "disabled")
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
    code, report, row = check("--path", str(path))
    assert (code, row["forecast"], row["known_as"], report["path"]) == (0, "already_fixed", ["2.0"], str(path))
    assert [each["fix"] for each in report["fixes"]] == ["toy-count"]
    absent = f"kvmend is not installed in {Path(row['location']).parent}: the forecast is for when it is"
    assert report["notes"] == ([] if form == "wheel" else [absent])


def test_check_warns_of_two_distributions_that_provide_the_framework(toy: Path) -> None:
    write_release(toy, "1.1", dist="toyfw-cpu")
    write_release(toy, "1.0")
    code, _, row = check()
    text = "toyfw 1.0, toyfw-cpu 1.1 all provide toyfw; uninstall all but one"
    assert (code, row["problems"]) == (0, [{"text": text, "fatal": False}])


def test_check_warns_of_variables_that_are_no_switch_and_of_a_bad_strict(toy: Path) -> None:
    write_release(toy)
    code, report, row = check(KVMEND_TOY_CUONT="0", KVMEND_STRICT="yes")
    bad = "KVMEND_STRICT='yes' is not allowed; allowed: 1, 0; no fix will be applied"
    assert report["problems"] == [
        {"text": bad, "fatal": True},
        {"text": "KVMEND_TOY_CUONT is no switch of kvmend; misspelt?", "fatal": False},
    ]
    assert (code, row["forecast"], row["reason"]) == (1, "failed", bad)


LISTED = """make_fix(framework=__import__("dataclasses").replace(
    TOYFW, unloadable=__import__("kvmend_fixes.vllm").vllm.VLLM.unloadable))"""


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("kvmend", ""),
        ("other,kvmend", ""),
        ("", "VLLM_PLUGINS='' does not name kvmend: it will not be loaded; set VLLM_PLUGINS=kvmend"),
        ("other", "VLLM_PLUGINS='other' does not name kvmend: it will not be loaded; set VLLM_PLUGINS=other,kvmend"),
        ("kvmnd", "does not name kvmend ('kvmnd' is a near miss): it will not be loaded; set VLLM_PLUGINS=kvmend"),
        ("KVMEND", "('KVMEND' is a near miss)"),
        ("other, kvmend", "(spaces are not stripped): it will not be loaded; set VLLM_PLUGINS=other,kvmend"),
        ("other;kvmend", "(names are split at commas only): it will not be loaded; set VLLM_PLUGINS=other,kvmend"),
    ],
)
def test_a_plugin_list_that_leaves_kvmend_out_is_the_forecast_with_what_to_set(
    root: Path, value: str, problem: str
) -> None:
    """Catches "will apply" beside a loader that will not load."""
    write_release(root)
    register_fix(root, LISTED)
    code, report, row = check(VLLM_PLUGINS=value)
    assert (code, report["ok"], row["ok"]) == (int(bool(problem)), not problem, not problem)
    assert row["forecast"] == ("not_loaded" if problem else "will_apply")
    assert problem in "".join(each["text"] for each in row["problems"])
    assert row["reason"].endswith("the lookup counts")
    assert not problem or row["reason"].startswith(row["problems"][0]["text"])


def test_a_plugin_list_is_no_matter_where_the_fix_is_not_needed_or_not_wanted(root: Path) -> None:
    write_release(root, "2.0")
    register_fix(root, LISTED)
    assert [check(VLLM_PLUGINS="")[0], check(VLLM_PLUGINS="")[2]["forecast"]] == [0, "already_fixed"]
    write_release(root, "1.0")
    code, _, row = check(VLLM_PLUGINS="", KVMEND_TOY_COUNT="0")
    assert (code, row["forecast"], row["problems"]) == (0, "disabled", [])


def test_with_path_this_shells_variables_do_not_count_unless_asked_for(root: Path, tmp_path: Path) -> None:
    """Catches a verdict on a container's image that the variables of the shell outside have made."""
    write_release(root)
    register_fix(root, LISTED)
    arguments = ("--path", str(root))
    code, report, row = check(*arguments, VLLM_PLUGINS="", KVMEND="0")
    assert (code, row["forecast"], row["problems"], report["environment"]) == (0, "will_apply", [], False)
    assert report["notes"][0] == "this shell's KVMEND, VLLM_PLUGINS did not count; with --env they do"
    code, report, row = check(*arguments, "--env", VLLM_PLUGINS="")
    assert (code, row["forecast"], report["environment"]) == (1, "not_loaded", True)


def test_with_path_what_the_servers_environment_needs_is_said_and_is_no_failure() -> None:
    """Catches FastDeploy images that load no plugin, unsaid because the shell outside sets nothing either."""
    from kvmend_fixes.fastdeploy import FASTDEPLOY

    fix = next(fix for fix in registry.discover()[0] if fix.framework == FASTDEPLOY)
    loader = "def load_plugins_by_group(group):\n    if envs.FD_PLUGINS is None:\n        return {}\n"
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("__init__", ""), ("plugins/__init__", ""), ("plugins/utils", loader)):
            file = Path(folder, "fastdeploy", f"{name}.py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        fix = dataclasses.replace(fix, fingerprints="", probe=lambda sources: Finding(state=AFFECTED, reason="x"))
        fix = dataclasses.replace(fix, sites=(site("load_plugins_by_group", "fastdeploy.plugins.utils"),))
        (row,) = examine((fix,), Path(folder), environ={})["fixes"]
    text = "FD_PLUGINS is not set, and this release then loads no plugin: set FD_PLUGINS=kvmend"
    text = f"for the server's environment: {text}"
    assert (row["forecast"], row["ok"], row["problems"]) == ("will_apply", True, [{"text": text, "fatal": False}])


_RETURN = "    if wanted is None:\n        # allowed_plugins is None or\n        return {}\n"
_LOADERS = {
    "all": "    if wanted is None:\n        log()\n"
    "    return [p for p in found if wanted is None or p.name in wanted]\n",
    "none": _RETURN + "    return [p for p in found if p.name in wanted]\n",
    "both": _RETURN + "    return [p for p in found if wanted is None or p.name in wanted]\n",
}


@pytest.mark.parametrize(("loader", "loads"), [("all", True), ("none", False), ("both", False), (None, None)])
def test_what_fastdeploy_loads_without_a_list_is_read_off_the_syntax_tree(
    tmp_path: Path, loader: str | None, loads: bool | None
) -> None:
    """Catches a comment, or an expression that is never reached, taken for what the loader does."""
    from kvmend_fixes.fastdeploy import FASTDEPLOY, unloadable

    (tmp_path / "fastdeploy" / "plugins").mkdir(parents=True)
    (tmp_path / "fastdeploy" / "__init__.py").touch()
    if loader:
        text = (
            f"def load_plugins_by_group(group):\n    wanted, found = envs.FD_PLUGINS, points(group)\n{_LOADERS[loader]}"
        )
        (tmp_path / "fastdeploy" / "plugins" / "utils.py").write_text(text, encoding="utf-8")
    installation = locate_path(FASTDEPLOY, tmp_path)
    assert installation is not None
    said = unloadable({}, installation)
    assert bool(said) is not loads
    assert not said or ("cannot be read" in said[0]) == (loads is None)
    assert unloadable({"FD_PLUGINS": "kvmend"}, installation) == ()


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


def spent_by(*arguments: str, path: Path) -> tuple[int, float]:
    """Exit code and processor time, in seconds, of an interpreter."""
    child = subprocess.Popen(
        [sys.executable, *arguments], env=clean_environment(path=[path]), stdout=subprocess.DEVNULL
    )  # fmt: skip
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, usage.ru_utime + usage.ru_stime


def test_check_answers_within_half_a_second_of_processor_time(root: Path) -> None:
    # vLLM's own files in size and shape: the bodies that its fixes read, in modules of several thousand lines.
    filler = "".join(
        f"\n\ndef helper_{n}(a, b=None):\n    '''Text {n}.'''\n    return [a, b, '{n}'] if b else f'{{a}}'\n"
        for n in range(900)
    )
    fixes = [fix for fix in registry.discover()[0] if fix.framework.package == "vllm"]
    bodies = {body.key: body for fix in fixes for body in fix.read}.values()
    (root / "vllm").mkdir()
    (root / "vllm" / "__init__.py").touch()
    for module in {body.module for body in bodies}:
        names = sorted({body.qualname.split(".")[0] for body in bodies if body.module == module})
        methods = {
            name: [b.qualname.split(".")[1] for b in bodies if b.module == module and b.qualname.startswith(f"{name}.")]
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
    bare, spent = [], []
    for _ in range(5):
        bare.append(spent_by("-c", "pass", path=root)[1])
        code, seconds = spent_by("-m", "kvmend", "check", "--json", path=root)
        assert code == 1  # that source is no release of vLLM
        spent.append(seconds)
    # On a machine that is busy with something else processor time is longer too, that of a bare start as well.
    assert min(spent) < max(0.5, 25 * min(bare)), (spent, bare)
