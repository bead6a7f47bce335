"""The distribution: what is in it, what it needs, and that it runs from the wheel and on its oldest requirements."""

from __future__ import annotations

import configparser
import email
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvmend import __version__
from support.interpreter import ROOT, run
from support.packages import build, install
from support.toyfix import make_fix, write_table
from support.toyfw import register_fix, write_release

PACKAGES = {"kvmend": ROOT / "plugins" / "kvmend", "kvmend_fixes": ROOT / "patches" / "kvmend_fixes"}
_SMOKE = """
import json, sys
from kvmend import cli, loading
from kvmend.applier import results
def ask(*arguments):
    try:
        return cli.run(list(arguments))
    except BaseException as error:
        return repr(error)
commands = (["list"], ["explain", "vllm-prefix-stats"], ["check"], ["check", "--json"], ["--help"], ["--version"])
codes = [ask(*command) for command in commands]
errors = [ask("explain", "nope"), ask("nope"), ask("check", "--nope"), ask("check", "--path", "/no/where")]
ask()
loading.apply_all("toyfw")
import toyfw.engine
outcomes = [result.outcome for result in results() if result.fix == "toy-count"]
answer([codes, errors, toyfw.engine.Engine().lookup("a"), outcomes, sys.modules["kvmend"].__file__])
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    write_release(tmp_path)
    write_table(tmp_path, make_fix())
    register_fix(tmp_path, 'make_fix(fingerprints="toytables:toy-count.json")')
    return tmp_path


def requirements(wheel: Path) -> list[Requirement]:
    """What the wheel needs without any extra."""
    found = map(Requirement, metadata(wheel).get_all("Requires-Dist") or [])
    return [each for each in found if each.marker is None or each.marker.evaluate({"extra": ""})]


def member(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"kvmend-{__version__}.dist-info/{name}").decode()


def metadata(wheel: Path) -> email.message.Message:
    return email.message_from_string(member(wheel, "METADATA"))


def test_the_wheel_holds_both_packages_with_their_data_and_nothing_else(built: tuple[Path, Path]) -> None:
    expected = {
        f"{name}/{file.relative_to(folder).as_posix()}"
        for name, folder in PACKAGES.items()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    with zipfile.ZipFile(built[0]) as archive:
        found = {name for name in archive.namelist() if not name.startswith(f"kvmend-{__version__}.dist-info/")}
    assert found == expected
    assert all(name.endswith((".py", ".json", "/py.typed")) for name in found)
    assert found >= {
        "kvmend/py.typed", "kvmend/report.schema.json", "kvmend/check.schema.json", "kvmend/verify.schema.json",
        "kvmend/status.schema.json", "kvmend_fixes/py.typed", "kvmend_fixes/fingerprints/vllm-prefix-stats.json",
    }  # fmt: skip


def test_the_source_distribution_holds_sources_and_tests_and_no_leftovers(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {
        "pyproject.toml", "README.md", "LICENSE", "PKG-INFO", "plugins/kvmend/fix.py",
        "patches/kvmend_fixes/vllm/prefix_stats.py",
        "integration_tests/unit/test_package.py", "integration_tests/support/toyfw.py",
        "Makefile", "noxfile.py", "mkdocs.yml", "docs/index.md", "docs/examples/kvmend-tinyserve/pyproject.toml",
    }  # fmt: skip
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc") or name.startswith(".git/")]


def test_it_needs_four_small_libraries_with_lower_bounds_only(built: tuple[Path, Path]) -> None:
    found = requirements(built[0])
    assert {each.name for each in found} == {"click", "packaging", "rich"}
    for each in found:
        assert [specifier.operator for specifier in each.specifier] == [">="]
        assert not each.extras


def test_the_metadata_name_python_versions_license_and_entry_points(built: tuple[Path, Path]) -> None:
    found = metadata(built[0])
    assert (found["Name"], found["Version"], found["Requires-Python"]) == ("kvmend", __version__, ">=3.10")
    versions = {line.rpartition(" ")[2] for line in found.get_all("Classifier") or [] if "Python :: 3." in line}
    assert versions == {"3.10", "3.11", "3.12", "3.13"}
    assert "Apache-2.0" in (found["License"] or found["License-Expression"])
    points = configparser.ConfigParser(delimiters="=")
    points.read_string(member(built[0], "entry_points.txt"))
    assert points["console_scripts"]["kvmend"] == "kvmend.cli:main"
    assert points["vllm.general_plugins"]["kvmend"] == "kvmend.loading:load_vllm"
    assert points["kvmend.fixes.vllm"]["vllm-prefix-stats"] == "kvmend_fixes.vllm.prefix_stats:FIX"


def test_every_registered_fix_has_its_own_name_and_every_table_is_readable() -> None:
    import importlib.metadata

    from kvmend.fingerprint import load_table

    points = [
        point
        for package in ("fastdeploy", "vllm")
        for point in importlib.metadata.entry_points(group=f"kvmend.fixes.{package}")
    ]
    assert points
    for point in points:
        fix = point.load()
        assert (fix.id, f"kvmend.fixes.{fix.framework.package}") == (point.name, point.group)
        if fix.fingerprints:
            table = load_table(fix.fingerprints)
            assert table.fix == fix.id
            assert all(set(each.bodies) == {body.key for body in fix.read} for each in table.generations)


def smoke(*path: Path) -> str:
    """Runs loading and every command in a process; returns where kvmend was imported from."""
    done = run(_SMOKE, path=path)
    codes, errors, found, outcomes, place = done.value
    assert codes == [0] * 6, done.stderr
    assert errors == [2] * 4, done.stderr
    assert (found, outcomes) == ("found a +kvmend", ["applied"])
    assert "Traceback" not in done.stderr
    return str(place)


def test_the_wheel_works_when_unpacked_onto_the_path(built: tuple[Path, Path], toy: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(built[0]) as archive:
        archive.extractall(tmp_path / "unpacked")
    assert smoke(tmp_path / "unpacked", toy) == str(tmp_path / "unpacked" / "kvmend" / "__init__.py")


@pytest.mark.slow
def test_it_works_with_the_oldest_libraries_it_allows(built: tuple[Path, Path], toy: Path, tmp_path: Path) -> None:
    oldest = {each.name: next(iter(each.specifier)).version for each in requirements(built[0])}
    libraries = install(tmp_path / "oldest", *(f"{name}=={version}" for name, version in oldest.items()))
    assert smoke(libraries, toy)
    code = "import importlib.metadata as m\nanswer({n: m.version(n) for n in ('click', 'packaging', 'rich')})"
    found = run(code, path=[libraries]).value
    assert {name: found[name].split(".")[:2] for name in oldest} == {
        name: version.split(".")[:2] for name, version in oldest.items()
    }
