"""Who may import whom: one way down through the host, and fixes that know the host by its API only."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.interpreter import ROOT

HOST, FIXES = ROOT / "plugins" / "kvmend", ROOT / "patches" / "kvmend_fixes"
FRAMEWORKS = {"vllm", "fastdeploy", "torch", "paddle"}

#: Every room of the host, lowest first; a room may import from rooms below its own only.
FLOORS = (
    {"kvmend", "kvmend.errors", "kvmend.counters", "kvmend.imports", "kvmend.pluginlist", "kvmend.record"},
    {"kvmend.fix", "kvmend.outcome", "kvmend.process"},
    {"kvmend.fingerprint", "kvmend.settings", "kvmend.registry", "kvmend.seams"},
    {"kvmend.api", "kvmend.voice"},
    {"kvmend.source", "kvmend.trees"},
    {"kvmend.locate"},
    {"kvmend.judge"},
    {"kvmend.plan"},
    {"kvmend.journal"},
    {"kvmend.applier"},
    {"kvmend.hooks", "kvmend.report"},
    {"kvmend.freshener"},
    {"kvmend.loading"},
    {"kvmend.startup"},
    {"kvmend.cli"},
    {"kvmend.__main__"},
)


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files(*folders: Path) -> list[Path]:
    return sorted(file for folder in folders for file in folder.rglob("*.py"))


def imports(file: Path, *, module_level: bool = False) -> Iterator[str]:
    """What a file imports, `package.module` for `from package import module`; without what only type checkers run."""

    def walk(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if module_level and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    yield from walk(ast.parse(file.read_text(encoding="utf-8")))


def room(imported: str) -> str | None:
    """The room of the host that an imported name is in."""
    known = set().union(*FLOORS)
    parts = imported.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if name in known:
            return (
                name
                if name != "kvmend" or end == len(parts) or parts[1].startswith("__")
                else f"unknown room {imported}"
            )
    return None


def floor(name: str) -> int:
    (number,) = [number for number, rooms in enumerate(FLOORS) if name in rooms]
    return number


@pytest.mark.parametrize("file", files(HOST), ids=name_of)
def test_a_room_of_the_host_imports_only_from_below(file: Path) -> None:
    own = "kvmend.cli" if "cli" in file.parts else name_of(file)
    for imported in imports(file):
        if imported.partition(".")[0] == "kvmend":
            found = room(imported)
            assert found is not None
            below = floor(found) < floor(own) or found == own == "kvmend.cli"
            assert below, f"{own} imports {imported}"


@pytest.mark.parametrize("file", files(HOST), ids=name_of)
def test_the_host_imports_no_fix_and_no_framework(file: Path) -> None:
    for imported in imports(file):
        assert imported.partition(".")[0] not in {"kvmend_fixes", *FRAMEWORKS}, imported


@pytest.mark.parametrize("file", [file for file in files(HOST) if "cli" not in file.parts], ids=name_of)
def test_what_runs_in_a_server_needs_the_standard_library_only(file: Path) -> None:
    outside = {imported.partition(".")[0] for imported in imports(file)} - {"kvmend", *sys.stdlib_module_names}
    assert not outside


def test_the_errors_import_nothing() -> None:
    assert list(imports(HOST / "errors.py")) == ["__future__.annotations"]


FIX_FILES = files(FIXES / "vllm", FIXES / "fastdeploy")


@pytest.mark.parametrize("file", FIX_FILES, ids=name_of)
def test_a_fix_imports_the_api_and_its_own_package_and_nothing_heavy(file: Path) -> None:
    own = f"kvmend_fixes.{file.parent.name}"
    for imported in imports(file):
        top = imported.partition(".")[0]
        if top == "kvmend":
            assert imported.startswith("kvmend.api."), imported
        if top == "kvmend_fixes":
            assert imported.startswith(f"{own}."), imported
    for imported in imports(file, module_level=True):
        top = imported.partition(".")[0]
        assert top in {"kvmend", "kvmend_fixes", *sys.stdlib_module_names}, imported


@pytest.mark.parametrize("file", FIX_FILES, ids=name_of)
def test_a_fix_is_imported_by_no_other(file: Path) -> None:
    fixes = {name_of(each) for each in FIX_FILES if not each.name.startswith("_")}
    for imported in imports(file):
        assert not {imported, imported.rpartition(".")[0]} & fixes, imported


@pytest.mark.parametrize("file", files(FIXES), ids=name_of)
def test_everything_beside_the_host_knows_the_host_by_its_api_only(file: Path) -> None:
    for imported in imports(file):
        if imported.partition(".")[0] == "kvmend":
            assert imported.startswith("kvmend.api."), imported


@pytest.mark.parametrize("file", files(HOST, FIXES), ids=name_of)
def test_a_file_has_a_docstring_and_is_not_much_over_three_hundred_lines(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text))
    assert text.count("\n") <= 400
