"""Finds a framework's files without importing it: installed here, in a folder, or in a wheel."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from kvmend.errors import LocateError
from kvmend.fix import BodySource, Framework
from kvmend.source import find_body

#: Where a folder given by the user may keep packages: itself, a virtual environment, a mounted container root.
_SITE_PATTERNS = (
    "",
    "lib/python3*/site-packages",
    "lib64/python3*/site-packages",
    "Lib/site-packages",
    "usr/lib/python3*/site-packages",
    "usr/lib/python3/dist-packages",
    "usr/local/lib/python3*/site-packages",
    "usr/local/lib/python3*/dist-packages",
    "opt/*/lib/python3*/site-packages",
    "root/.venv/lib/python3*/site-packages",
)


class Tree(Protocol):
    """A place that holds packages."""

    def read(self, relative: str) -> str | None:
        """Text of a file by its path below the place, or None if it is not there."""

    def where(self, relative: str) -> str:
        """How the user would name that file."""


@dataclass(frozen=True, slots=True)
class FolderTree:
    """A folder that holds packages, as one on `sys.path` does."""

    root: Path

    def read(self, relative: str) -> str | None:
        """See `Tree.read`."""
        try:
            return (self.root / relative).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError):
            return None

    def where(self, relative: str) -> str:
        """See `Tree.where`."""
        return str(self.root / relative)


@dataclass(frozen=True, slots=True)
class WheelTree:
    """A wheel, read in place."""

    path: Path

    def read(self, relative: str) -> str | None:
        """See `Tree.read`."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                return archive.read(relative).decode("utf-8-sig")
        except (KeyError, UnicodeDecodeError, OSError, zipfile.BadZipFile, zlib.error):
            return None

    def where(self, relative: str) -> str:
        """See `Tree.where`."""
        return f"{self.path}!/{relative}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A distribution that provides the framework's package."""

    name: str
    version: str


@dataclass(frozen=True, kw_only=True)
class Installation:
    """A framework's files. Satisfies `kvmend.fix.Sources`.

    Attributes:
        framework: The framework.
        tree: Where the files are.
        location: The package, as the user would name it.
        distributions: Who provides it; empty for a plain source tree, more than one is worth a warning.
    """

    framework: Framework
    tree: Tree
    location: str
    distributions: tuple[Distribution, ...] = ()
    _texts: dict[str, tuple[str, str] | None] = field(default_factory=dict)
    _bodies: dict[str, BodySource | None] = field(default_factory=dict)

    @cached_property
    def version(self) -> str | None:
        """Version of the (first) distribution, or None."""
        return self.distributions[0].version if self.distributions else None

    def _module(self, module: str) -> tuple[str, str] | None:
        if module not in self._texts:
            base = module.replace(".", "/")
            self._texts[module] = next(
                (
                    (text, self.tree.where(relative))
                    for relative in (f"{base}.py", f"{base}/__init__.py")
                    if (text := self.tree.read(relative)) is not None
                ),
                None,
            )
        return self._texts[module]

    def text(self, module: str) -> str | None:
        """The whole source of a module, or None if it is not there."""
        found = self._module(module)
        return found[0] if found else None

    def path(self, module: str) -> str | None:
        """The file of a module, or None if it is not there."""
        found = self._module(module)
        return found[1] if found else None

    def body(self, module: str, qualname: str) -> BodySource | None:
        """The source of a body, or None if the module or the name is not there."""
        key = f"{module}:{qualname}"
        if key not in self._bodies:
            found = self._module(module)
            self._bodies[key] = find_body(found[0], module, qualname, found[1]) if found else None
        return self._bodies[key]


def locate_installed(framework: Framework) -> Installation | None:
    """The installation that `import` would find, or has found, in this interpreter; None if there is none."""
    folder = _package_folder(framework.package)
    if folder is None:
        return None
    return Installation(
        framework=framework,
        tree=FolderTree(folder.parent),
        location=str(folder),
        distributions=_distributions(framework, folder.parent) or _registered(framework),
    )


def _package_folder(package: str) -> Path | None:
    module = sys.modules.get(package)
    if module is not None and getattr(module, "__file__", None):
        return Path(str(module.__file__)).parent if hasattr(module, "__path__") else None
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    # A folder without __init__.py (a checkout beside the script, say) is a namespace package, not an installation;
    # nor is a single file (a script that somebody named after the framework).
    if spec is None or not spec.origin or spec.submodule_search_locations is None:
        return None
    return Path(spec.origin).parent


def locate_path(framework: Framework, path: Path) -> Installation | None:
    """The installation at a path that the user gave; None if the framework is not in it.

    Args:
        framework: The framework to look for.
        path: A wheel, the package itself, a folder that holds it, an environment, or a mounted container root.

    Raises:
        LocateError: The path does not exist, or is a file that is no wheel.
    """
    if not path.exists():
        raise LocateError(f"{path}: no such file or folder")
    if path.is_file():
        return _locate_wheel(framework, path)
    path = path.resolve()
    if path.name == framework.package and (path / "__init__.py").is_file():
        path = path.parent
    for pattern in _SITE_PATTERNS:
        for root in sorted(path.glob(pattern)) if pattern else [path]:
            package = root / framework.package
            if (package / "__init__.py").is_file():
                return Installation(
                    framework=framework,
                    tree=FolderTree(root),
                    location=str(package),
                    distributions=_distributions(framework, root),
                )
    return None


def _locate_wheel(framework: Framework, path: Path) -> Installation | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
    except (zipfile.BadZipFile, OSError) as error:
        raise LocateError(f"{path}: not a wheel ({error})") from error
    if f"{framework.package}/__init__.py" not in names:
        return None
    tree = WheelTree(path)
    metadata = next((name for name in sorted(names) if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)), None)
    text = tree.read(metadata) if metadata else None
    return Installation(
        framework=framework,
        tree=tree,
        location=tree.where(framework.package),
        distributions=tuple(_parse_metadata(text)) if text else (),
    )


def _parse_metadata(text: str) -> Iterator[Distribution]:
    fields: dict[str, str] = {}
    for line in text.splitlines():
        if not line.strip():
            break
        name, separator, value = line.partition(": ")
        if separator:
            fields.setdefault(name, value.strip())
    if "Name" in fields and "Version" in fields:
        yield Distribution(name=fields["Name"], version=fields["Version"])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _distributions(framework: Framework, root: Path) -> tuple[Distribution, ...]:
    """Distributions in `root` that provide the package: by known name first, by what they install otherwise."""
    known = [_normal(name) for name in framework.distributions]
    infos = sorted(root.glob("*.dist-info"))
    chosen = [info for info in infos if _normal(info.name[: -len(".dist-info")].rpartition("-")[0]) in known]
    if not chosen:
        chosen = [info for info in infos if _installs(info, framework.package)]
    found = [
        distribution for info in chosen for distribution in _parse_metadata(FolderTree(info).read("METADATA") or "")
    ]
    return tuple(sorted(found, key=lambda entry: known.index(name) if (name := _normal(entry.name)) in known else 99))


def _installs(info: Path, package: str) -> bool:
    top_level = FolderTree(info).read("top_level.txt")
    if top_level is not None:
        return package in top_level.split()
    record = FolderTree(info).read("RECORD") or ""
    return record.startswith(f"{package}/") or f"\n{package}/" in record


def _registered(framework: Framework) -> tuple[Distribution, ...]:
    """An editable install keeps its metadata away from its source; ask by the known names."""
    found = []
    for name in framework.distributions:
        try:
            found.append(Distribution(name=name, version=importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)
