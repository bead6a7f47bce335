"""`kvmend check` on the installation of kvmend itself."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from checks import check, check_apart

from kvmend import __version__
from support.interpreter import SOURCES, clean_environment
from support.toyfw import register_fix, write_dist_info, write_release

LOADED = 'make_fix(framework=__import__("dataclasses").replace(TOYFW, plugin_group="toyfw.plugins"))'
_OWN = {"entry_points.txt": "[toyfw.plugins]\nkvmend = kvmend.loading:load_vllm\n\n[kvmend.fixes]\n"
        "vllm-prefix-stats = kvmend_fixes.vllm.prefix_stats:FIX\n"}  # fmt: skip


def test_an_entry_point_that_the_frameworks_loader_would_not_find_is_the_forecast(root: Path) -> None:
    """Catches metadata of a release before the entry point existed: nothing would ever load kvmend."""
    write_release(root)
    register_fix(root, LOADED)
    code, _, row = check_apart(root)
    assert (code, row["forecast"]) == (1, "not_loaded")
    assert row["problems"][0]["text"].endswith("registers nothing in toyfw.plugins: reinstall kvmend")
    write_dist_info(root, "kvmend", __version__, _OWN)
    code, report, row = check_apart(root)
    assert (code, row["forecast"], row["problems"]) == (0, "will_apply", [])
    assert report["problems"][0]["text"].startswith("kvmend is installed more than once, the first one counts: ")


def test_stale_metadata_that_hides_the_entry_points_is_named_with_what_it_hides(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Catches an egg-info left in a checkout that stands before site-packages."""
    stale = tmp_path_factory.mktemp("checkout")
    (stale / "kvmend.egg-info").mkdir()
    (stale / "kvmend.egg-info" / "PKG-INFO").write_text("Name: kvmend\nVersion: 0.0.1\n", encoding="utf-8")
    write_release(root)
    register_fix(root, LOADED)
    good = write_dist_info(root, "kvmend", __version__, _OWN)
    code, report, row = check_apart(stale, root)
    assert (code, row["forecast"]) == (1, "not_loaded")
    egg = stale / "kvmend.egg-info"
    text = f"{egg} (version 0.0.1) registers nothing in toyfw.plugins and hides {good}: remove the former"
    assert row["problems"] == [{"text": text, "fatal": True}]
    texts = [(each["text"], each["fatal"]) for each in report["problems"]]
    assert any(f"{egg} says version 0.0.1, the kvmend imported from " in text for text, _ in texts)
    assert (
        f"{egg} registers none of its fixes: no fix of kvmend's own will be applied, reinstall kvmend",
        True,
    ) in texts


def test_a_kvmend_that_is_only_on_the_path_is_no_success(tmp_path: Path) -> None:
    """Catches exit code 0 and an empty list from an interpreter that has kvmend's files and none of its metadata."""
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for name in ("click", "packaging", "rich", "markdown_it", "mdurl", "pygments"):
        if (spec := importlib.util.find_spec(name)) and spec.origin:
            (libraries / name).symlink_to(Path(spec.origin).parent)
    command = [sys.executable, "-S", "-m", "kvmend", "check"]
    done = subprocess.run(
        command, env=clean_environment(path=[libraries, *SOURCES]), cwd=tmp_path, capture_output=True, text=True
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    assert f"{sys.executable} has no metadata of it: no fix of kvmend's own will be applied" in done.stdout


def test_a_plugin_of_somebody_elses_under_our_name_is_named(root: Path) -> None:
    write_release(root)
    register_fix(root, LOADED)
    taken = {"entry_points.txt": "[toyfw.plugins]\nkvmend = squatter:run\n"}
    write_dist_info(root, "squatter", "1", taken)
    _, _, row = check_apart(root)
    assert row["reason"].startswith("the plugin named kvmend of the group toyfw.plugins is squatter:run, not kvmend's")


def test_a_fix_that_could_not_be_loaded_is_no_success(toy: Path) -> None:
    write_release(toy)
    register_fix(toy, "1 / 0", name="toy-broken", dist="broken-fixes")
    code, report, row = check()
    text = "fix toy-broken of broken-fixes could not be loaded: ZeroDivisionError: division by zero"
    assert (code, report["problems"], row["forecast"]) == (1, [{"text": text, "fatal": True}], "will_apply")


def test_the_frameworks_command_of_another_interpreter_is_named(toy: Path, tmp_path: Path) -> None:
    """Catches a kvmend installed beside, not in, the environment of the server: all is well, and nothing happens."""
    script = tmp_path / "bin" / "toyfw"
    script.parent.mkdir()
    script.write_text("#!/opt/serving/bin/python\n", encoding="utf-8")
    script.chmod(0o755)
    code, report, row = check(PATH=str(script.parent))
    text = f"the command {script} runs in /opt/serving/bin/python, which this is not: run kvmend there"
    assert (code, row["problems"]) == (0, [{"text": text, "fatal": False}])
    assert any(note.startswith("none of the packages ") for note in report["notes"])
