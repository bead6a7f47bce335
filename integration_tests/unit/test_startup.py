"""The startup hook: an environment of its own with the `.pth` file in it, in every state that it can be in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvmend.cli.hook import FILE, content, read_hook
from support.interpreter import INTEGRATION_TESTS, SOURCES, clean_environment
from support.toyfw import modules_of, register_fix, write_release

PACKAGES = ["fastdeploy", "toyfw", "vllm"]
MENDED, PLAIN = "found a +kvmend", "found a"
_LOOK = "import toyfw.engine; print(toyfw.engine.Engine().lookup('a'))"


class Environment:
    """A virtual environment that has kvmend, its libraries, a toy framework and a fix for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        real = Path(os.path.realpath(sys.executable))
        self.site = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
        self.site.mkdir(parents=True)
        (folder / "bin").mkdir()
        (folder / "bin" / "python").symlink_to(real)
        settings = f"home = {real.parent}\ninclude-system-site-packages = false\n"
        (folder / "pyvenv.cfg").write_text(settings, encoding="utf-8")
        self.python = str(folder / "bin" / "python")
        libraries = next(path for path in sys.path if path.endswith("site-packages"))
        self.sources = self.site / "__editable__.kvmend.pth"
        self.sources.write_text("\n".join(map(str, (*SOURCES, INTEGRATION_TESTS, libraries))) + "\n", encoding="utf-8")
        self.hook = self.site / FILE
        write_release(self.site)
        register_fix(self.site)

    def run(self, *arguments: str, path: Iterable[Path | str] = (), **env: str) -> subprocess.CompletedProcess[str]:
        """The environment's interpreter; nothing of this process's path is on its own."""
        variables = clean_environment(env) | {"PYTHONPATH": os.pathsep.join(map(str, path))}
        return subprocess.run(
            [self.python, *arguments], env=variables, cwd=self.folder, capture_output=True, text=True, timeout=60
        )  # fmt: skip

    def command(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """`kvmend hook`."""
        return self.run("-m", "kvmend", "hook", *arguments, **env)

    def lookup(self, *flags: str, path: Iterable[Path | str] = (), **env: str) -> str:
        """What a lookup says in a process that loads no plugin."""
        done = self.run(*flags, "-c", _LOOK, path=path, **env)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.strip()


@pytest.fixture
def place(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "env")


@pytest.fixture
def enabled(place: Environment) -> Environment:
    place.hook.write_text(content(PACKAGES), encoding="utf-8")
    return place


# The command --------------------------------------------------------------------------------------------------------


def test_enable_writes_one_file_and_disable_removes_it_each_as_often_as_one_likes(place: Environment) -> None:
    before = sorted(place.site.iterdir())
    assert place.command("status").stdout == "startup hook: disabled\n"
    assert place.command("status").returncode == 1
    first, second = place.command("enable"), place.command("enable")
    packages = "fastdeploy, toyfw, vllm"
    assert first.stdout == f"{place.hook}: enabled, for {packages}\n"
    assert second.stdout == f"{place.hook}: was enabled before, for {packages}\n"
    assert set(place.site.iterdir()) - set(before) == {place.hook}
    assert place.hook.stat().st_mode & 0o777 == 0o644
    status = place.command("status")
    assert (status.returncode, status.stdout) == (0, f"startup hook: enabled for {packages} ({place.hook})\n")
    assert place.lookup() == MENDED
    assert [place.command("disable").stdout for _ in range(2)] == [
        f"{place.hook}: removed\n",
        f"{place.hook}: was not enabled\n",
    ]
    assert sorted(place.site.iterdir()) == before
    assert place.lookup() == PLAIN


def test_a_file_of_our_own_with_blank_lines_comments_or_other_packages_is_ours(enabled: Environment) -> None:
    text = enabled.hook.read_text(encoding="utf-8").replace("'toyfw', ", "")
    enabled.hook.write_text(f"# a remark\n\n{text}", encoding="utf-8")
    assert read_hook(enabled.site).packages == ("fastdeploy", "vllm")
    assert enabled.lookup() == PLAIN
    assert enabled.command("enable").returncode == 0
    assert enabled.hook.read_text(encoding="utf-8") == content(PACKAGES)
    assert enabled.lookup() == MENDED
    assert enabled.command("disable").returncode == 0
    assert not enabled.hook.exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import sys\n", "has a line that kvmend did not write: line 1"),
        ("{ours}import sys\n", "has a line that kvmend did not write: line 3"),
        ("{edited}", "has a line that kvmend did not write: line 2"),
        ("", "has no line of kvmend's"),
        (None, "is a symbolic link"),
    ],
)
def test_what_is_not_ours_alone_is_neither_removed_nor_written_over(
    enabled: Environment, text: str | None, problem: str
) -> None:
    ours = enabled.hook.read_text(encoding="utf-8")
    if text is None:
        enabled.hook.rename(enabled.site / "real")
        enabled.hook.symlink_to("real")
    else:
        changed = text.replace("{ours}", ours).replace("{edited}", ours.replace("pass", "raise"))
        enabled.hook.write_text(changed, encoding="utf-8")
    before = enabled.hook.read_bytes()
    for verb in ("enable", "disable"):
        done = enabled.command(verb)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.startswith(f"kvmend: {enabled.hook} {problem}; nothing was changed")
    assert enabled.hook.read_bytes() == before
    assert enabled.command("status").stdout == f"startup hook: {enabled.hook} {problem}; it is left alone\n"


def test_a_folder_that_cannot_be_written_is_one_line(place: Environment) -> None:
    """The refusal is made here: whoever runs the tests may be allowed to write everywhere."""
    code = (
        "import os, sys\nfrom kvmend import cli\n"
        "def refuse(*_): raise PermissionError(13, 'Permission denied')\n"
        "os.replace = refuse\nsys.exit(cli.run(['hook', 'enable']))"
    )
    done = place.run("-c", code)
    assert (done.returncode, done.stderr) == (2, f"kvmend: {place.hook} cannot be written: Permission denied\n")
    assert not [path for path in place.site.iterdir() if path.name.startswith(".kvmend")]


def test_an_interpreter_that_reads_no_such_files_there_is_refused(place: Environment) -> None:
    code = (
        "import sys, sysconfig\nfrom kvmend import cli\n"
        f"sysconfig.get_path = lambda name: {str(place.folder)!r}\nsys.exit(cli.run(['hook', 'enable']))"
    )
    done = place.run("-c", code)
    assert done.returncode == 2
    assert done.stderr.startswith(f"kvmend: {place.folder} is no folder whose .pth files {place.python} reads")


def test_a_python_of_the_operating_system_needs_to_be_asked_for(place: Environment) -> None:
    code = (
        "import sys, sysconfig\nfrom kvmend import cli\n"
        "sys.base_prefix = sys.prefix\nplain = sysconfig.get_path\n"
        f"sysconfig.get_path = lambda name: {str(place.folder)!r} if name == 'stdlib' else plain(name)\n"
        "sys.exit(cli.run(['hook', 'enable', *sys.argv[1:]]))"
    )
    (place.folder / "EXTERNALLY-MANAGED").touch()
    done = place.run("-c", code)
    assert (done.returncode, place.hook.exists()) == (2, False)
    assert done.stderr.startswith(f"kvmend: {place.python} belongs to the operating system")
    assert place.run("-c", code, "--system").returncode == 0
    assert place.hook.exists()


def test_status_for_programs_says_what_the_file_says_and_what_this_interpreter_did(enabled: Environment) -> None:
    expected = {"state": "enabled", "path": str(enabled.hook), "packages": PACKAGES, "problem": None}
    done = enabled.command("status", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, expected | {"watching": PACKAGES})
    done = enabled.command("status", "--json", KVMEND="0")
    assert (done.returncode, json.loads(done.stdout)) == (1, expected | {"watching": []})
    done = enabled.command("status", KVMEND="0")
    assert done.stdout.endswith(", but not run by this interpreter: KVMEND=0\n")


def test_check_says_that_the_hook_is_enabled_and_counts_on_it(place: Environment) -> None:
    """Catches a forecast that knows plugins only."""
    listed = "plugin_group='toyfw.plugins', unloadable=lambda *_: ('the list leaves kvmend out',)"
    register_fix(place.site, f'make_fix(framework=__import__("dataclasses").replace(TOYFW, {listed}))')
    done = place.run("-m", "kvmend", "check")
    assert done.returncode == 1
    assert "toy-count  not_loaded" in done.stdout
    assert "startup hook: disabled" in done.stdout
    assert place.command("enable").returncode == 0
    done = place.run("-m", "kvmend", "check")
    assert done.returncode == 0
    assert "toy-count  will_apply" in done.stdout
    assert "the list leaves kvmend out; the startup hook brings it in all the same" in done.stdout
    assert f"startup hook: enabled for fastdeploy, toyfw, vllm ({place.hook})" in done.stdout


# Processes ----------------------------------------------------------------------------------------------------------


def test_a_process_that_loads_no_plugin_is_mended_and_one_that_does_is_not_mended_twice(enabled: Environment) -> None:
    assert enabled.lookup() == MENDED
    for plugin in ("{load}import toyfw.engine", "import toyfw\n{load}", "import toyfw.engine\n{load}{load}"):
        code = plugin.replace("{load}", "from kvmend import loading\nloading.load('toyfw')\n")
        done = enabled.run("-c", f"{code}\n{_LOOK}")
        assert (done.stdout.strip(), done.stderr) == (MENDED, "")


def test_a_process_that_imports_no_framework_imports_nothing_of_kvmend_and_has_one_finder_of_it(
    enabled: Environment,
) -> None:
    """Catches a finder for each of the two times that a virtual environment runs the line."""
    code = "import sys; print(*sorted(name for name in sys.modules if name.startswith(('kvmend', 'wrapt', 'import'))))"
    assert enabled.run("-c", code).stdout.split() == []
    code = "import sys; print([type(each).__name__ for each in sys.meta_path].count('KvmendWatch'))"
    assert enabled.run("-c", code).stdout.split() == ["1"]


def test_looking_for_a_framework_is_not_importing_it(enabled: Environment) -> None:
    """Catches work done in every process that asks whether a framework is there, as many libraries do."""
    look = "import importlib.util, sys; print(importlib.util.find_spec('toyfw').name, 'kvmend.loading' in sys.modules)"
    assert enabled.run("-c", look).stdout.split() == ["toyfw", "False"]


def test_the_framework_is_imported_as_without_the_hook(enabled: Environment) -> None:
    code = (
        "import importlib, importlib.resources, inspect, toyfw, toyfw.engine\n"
        "loader = toyfw.__loader__\n"
        "print(type(loader).__name__, toyfw.__spec__.loader is loader, vars(loader).keys())\n"
        "print(toyfw.__spec__.origin == toyfw.__file__, inspect.getsource(toyfw).strip())\n"
        "print(importlib.resources.files('toyfw').joinpath('engine.py').is_file())\n"
        "importlib.reload(toyfw); print(toyfw.engine.Engine().lookup('a'))\n"
    )
    with_hook = enabled.run("-c", code)
    assert with_hook.stdout.endswith(f"{MENDED}\n")
    assert enabled.command("disable").returncode == 0
    assert with_hook.stdout.replace(MENDED, PLAIN) == enabled.run("-c", code).stdout


def test_a_framework_that_fails_to_import_fails_as_without_the_hook_and_is_mended_the_next_time(
    enabled: Environment,
) -> None:
    broken = enabled.site / "toyfw" / "__init__.py"
    broken.write_text("import os\nif 'FINE' not in os.environ: raise ImportError('no GPU')\n", encoding="utf-8")
    code = f"import os\ntry: import toyfw\nexcept ImportError as error: print(error)\nos.environ['FINE'] = '1'\n{_LOOK}"
    done = enabled.run("-c", code)
    assert (done.stdout.split("\n")[:2], done.stderr) == (["no GPU", MENDED], "")


@pytest.mark.parametrize(("flags", "found"), [(["-I"], MENDED), (["-E"], MENDED), (["-s"], MENDED), (["-OO"], MENDED)])
def test_flags_that_leave_site_packages_in_leave_the_hook_in(
    enabled: Environment, flags: list[str], found: str
) -> None:
    assert enabled.lookup(*flags) == found


def test_without_the_site_module_there_is_no_hook(enabled: Environment) -> None:
    assert enabled.lookup("-S", path=[enabled.site]) == PLAIN


def test_a_framework_from_the_path_or_from_an_archive_is_mended_too(enabled: Environment, tmp_path: Path) -> None:
    for file in sorted((enabled.site / "toyfw").iterdir()):
        if file.is_file():
            file.unlink()
    (enabled.site / "toyfw").rename(enabled.site / "gone")
    write_release(tmp_path / "tree")
    assert enabled.lookup(path=[tmp_path / "tree"]) == MENDED
    with zipfile.ZipFile(tmp_path / "framework.zip", "w") as archive:
        for name, text in modules_of("1.0").items():
            archive.writestr(name, text)
    code = f"import sys, toyfw; print('kvmend.loading' in sys.modules, toyfw.__loader__.__class__.__name__)\n{_LOOK}"
    done = enabled.run("-c", code, path=[tmp_path / "framework.zip"])
    # The hook does its part; what has no files to read is left alone.
    assert (done.stdout.split("\n")[0], done.returncode) == ("True zipimporter", 0)


def test_a_forked_child_and_a_spawned_one_are_mended(enabled: Environment) -> None:
    code = f"import os\nif os.fork(): os.wait()\nelse:\n    {_LOOK}"
    assert enabled.run("-c", code).stdout.strip() == MENDED
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_LOOK!r}])"
    assert enabled.run("-c", code).stdout.strip() == MENDED


def test_the_masters_switch_keeps_the_hook_out_altogether(enabled: Environment) -> None:
    code = "import sys; print('kvmend' in sys.modules)"
    assert enabled.run("-c", code, KVMEND="0").stdout.strip() == "False"
    assert enabled.lookup(KVMEND="0") == PLAIN
    assert enabled.lookup(KVMEND_TOY_COUNT="0") == PLAIN


def test_strict_stops_a_process_that_needs_a_fix_and_no_other(enabled: Environment) -> None:
    done = enabled.run("-c", _LOOK, KVMEND_STRICT="1", KVMEND_TOY_COUNT="yes")
    assert done.returncode == 1
    assert "KVMEND_TOY_COUNT='yes' is not allowed" in done.stderr.strip().splitlines()[-1]
    done = enabled.run("-c", "print('fine')", KVMEND_STRICT="1", KVMEND_TOY_COUNT="yes")
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_other_import_hooks_for_the_same_framework_go_on_working(enabled: Environment) -> None:
    theirs = "import wrapt\nwrapt.register_post_import_hook(lambda m: print('theirs', m.__name__), 'toyfw')\n"
    before = f"import sys\nours = sys.meta_path.pop(0)\n{theirs}sys.meta_path.insert(0, ours)\n"
    for code in (theirs, before):
        done = enabled.run("-c", code + _LOOK)
        assert (done.stdout.split("\n")[:2], done.stderr) == (["theirs toyfw", MENDED], "")


# Broken -------------------------------------------------------------------------------------------------------------


def copy_of_kvmend(place: Environment) -> Path:
    """kvmend's files in the environment itself, to be damaged."""
    import shutil

    shutil.copytree(SOURCES[0] / "kvmend", place.site / "kvmend", ignore=shutil.ignore_patterns("__pycache__"))
    return place.site / "kvmend"


def uninstalled(place: Environment) -> None:
    place.sources.unlink()


def half_uninstalled(place: Environment) -> None:
    place.sources.unlink()
    (place.site / "kvmend" / "__pycache__").mkdir(parents=True)


def with_a_syntax_error(place: Environment) -> None:
    (copy_of_kvmend(place) / "startup.py").write_text("def watch(:\n", encoding="utf-8")


def with_an_older_startup(place: Environment) -> None:
    (copy_of_kvmend(place) / "startup.py").write_text("x = 1\n", encoding="utf-8")


@pytest.mark.parametrize("damage", [uninstalled, half_uninstalled, with_a_syntax_error, with_an_older_startup])
def test_a_kvmend_that_is_gone_or_broken_is_silent_and_stops_nothing(enabled: Environment, damage: object) -> None:
    assert callable(damage)
    damage(enabled)
    done = enabled.run("-c", "print('fine')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")
    # Nor does it cost anything: no file of kvmend's is looked at, let alone compiled anew at every start.
    code = "import sys; print([path for path in sys.path_importer_cache if path.endswith('kvmend')])"
    assert enabled.run("-c", code).stdout == "[]\n"
    assert enabled.lookup(KVMEND_STRICT="1") == PLAIN


def test_a_kvmend_that_cannot_be_loaded_says_so_in_one_line_where_a_framework_is_imported(enabled: Environment) -> None:
    (copy_of_kvmend(enabled) / "loading.py").write_text("raise ImportError('half gone')\n", encoding="utf-8")
    assert enabled.run("-c", "print('fine')").stderr == ""
    done = enabled.run("-c", _LOOK)
    assert done.stdout.strip() == PLAIN
    assert done.stderr == "kvmend could not be loaded, its fixes are missing: ImportError('half gone')\n"
    done = enabled.run("-c", _LOOK, KVMEND_STRICT="1")
    assert done.returncode == 1
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .endswith("KVMEND_STRICT=1: kvmend could not be loaded: ImportError('half gone')")
    )
