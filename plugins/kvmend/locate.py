"""Finds a framework's files without importing it: installed here, in a folder, or in a wheel."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import field
from functools import cached_property
from pathlib import Path

from kvmend.errors import LocateError
from kvmend.fix import BodySource, Framework
from kvmend.record import record
from kvmend.trees import FolderTree, Tree, WheelTree, decoded

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
    "opt/*/envs/*/lib/python3*/site-packages",
    "*venv*/lib/python3*/site-packages",
    ".venv/lib/python3*/site-packages",
    "*/.venv/lib/python3*/site-packages",
    "root/*conda*/lib/python3*/site-packages",
    "root/.local/lib/python3*/site-packages",
    "home/*/.venv/lib/python3*/site-packages",
    "home/*/.local/lib/python3*/site-packages",
)
#: The two kinds of folder that installers keep metadata in, and the file with the name and the version.
_METADATA = {".dist-info": "METADATA", ".egg-info": "PKG-INFO"}


@record(frozen=True, kw_only=True)
class Distribution:
    """A distribution that provides the framework's package."""

    name: str
    version: str


@record(frozen=True, kw_only=True)
class Installation:
    """A framework's files. Satisfies `kvmend.fix.Sources`.

    Attributes:
        framework: The framework.
        tree: Where the files are.
        location: The package, as the user would name it.
        distributions: Who provides it; empty for a plain source tree, more than one is worth a warning.
        others: Further places that hold the package, where a path was given that has several.
    """

    framework: Framework
    tree: Tree
    location: str
    distributions: tuple[Distribution, ...] = ()
    others: tuple[str, ...] = ()
    _files: dict[str, tuple[bytes, str] | None] = field(default_factory=dict)
    _texts: dict[str, tuple[str, str] | None] = field(default_factory=dict)
    _troubles: dict[str, str] = field(default_factory=dict)
    _bodies: dict[str, BodySource | None] = field(default_factory=dict)

    @cached_property
    def version(self) -> str | None:
        """Version of the (first) distribution, or None."""
        return self.distributions[0].version if self.distributions else None

    def _file(self, module: str) -> tuple[bytes, str] | None:
        if module not in self._files:
            base = module.replace(".", "/")
            try:
                self._files[module] = next(
                    (
                        (content, self.tree.where(relative))
                        for relative in (f"{base}.py", f"{base}/__init__.py")
                        if (content := self.tree.read(relative)) is not None
                    ),
                    None,
                )
            except LocateError as error:
                self._files[module], self._troubles[module] = None, str(error)
        return self._files[module]

    def _module(self, module: str) -> tuple[str, str] | None:
        if module not in self._texts:
            found = self._file(module)
            try:
                self._texts[module] = (decoded(*found), found[1]) if found else None
            except LocateError as error:
                self._texts[module], self._troubles[module] = None, str(error)
        return self._texts[module]

    def digest(self, modules: Iterable[str]) -> str:
        """What tells the files of modules from any others: 32 hex digits, the same for the same bytes everywhere.

        Args:
            modules: Dotted names, in any order; one that is not there counts, too.

        Returns:
            The digest, or "" where a file is there and cannot be read.
        """
        total = hashlib.sha256()
        for module in sorted(set(modules)):
            found = self._file(module)
            if module in self._troubles:
                return ""
            total.update(f"{module} {hashlib.sha256(found[0]).hexdigest() if found else None}\n".encode())
        return total.hexdigest()[:32]

    def trouble(self, module: str, *, parse: bool = True) -> str:
        """Why the file of a module, which is there, cannot be judged.

        Args:
            module: Dotted name.
            parse: Whether to look also if it is Python to this interpreter.

        Returns:
            One line, or "" if it can be judged or is not there.
        """
        found = self._module(module)
        if found is not None and parse and module not in self._troubles:
            self._troubles[module] = _not_python(*found)
        return self._troubles.get(module, "")

    def text(self, module: str) -> str | None:
        """The whole source of a module, or None if it is not there."""
        found = self._module(module)
        return found[0] if found else None

    def path(self, module: str) -> str | None:
        """The file of a module, or None if it is not there."""
        found = self._file(module)
        return found[1] if found else None

    def body(self, module: str, qualname: str) -> BodySource | None:
        """The source of a body, or None if the module or the name is not there."""
        key = f"{module}:{qualname}"
        if key not in self._bodies:
            found = self._module(module)
            from kvmend.source import find_body  # what reads source is not needed where files are known

            self._bodies[key] = find_body(found[0], module, qualname, found[1]) if found else None
        return self._bodies[key]


def _not_python(text: str, path: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        cause = f"{error.msg}, line {error.lineno}" if isinstance(error, SyntaxError) else str(error)
        return f"{path} is no source that Python {version} can parse: {cause}"
    return ""


def locate_installed(framework: Framework) -> Installation | None:
    """The installation that `import` would find, or has found, in this interpreter; None if there is none."""
    folder = _package_folder(framework.package)
    if folder is None:
        return None
    return Installation(
        framework=framework,
        tree=FolderTree(root=folder.parent),
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
    roots: dict[Path, Path] = {}
    for pattern in _SITE_PATTERNS:
        for root in sorted(path.glob(pattern)) if pattern else [path]:
            if (root / framework.package / "__init__.py").is_file():
                roots.setdefault(root.resolve(), root)
    if not roots:
        return None
    root, *others = roots.values()
    return Installation(
        framework=framework,
        tree=FolderTree(root=root),
        location=str(root / framework.package),
        distributions=_distributions(framework, root),
        others=tuple(str(other / framework.package) for other in others),
    )


def _locate_wheel(framework: Framework, path: Path) -> Installation | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
    except (zipfile.BadZipFile, OSError) as error:
        raise LocateError(f"{path}: not a wheel ({error})") from error
    if f"{framework.package}/__init__.py" not in names:
        return None
    tree = WheelTree(path=path)
    metadata = next((name for name in sorted(names) if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)), None)
    text = _text_or_none(tree, metadata) if metadata else None
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
    try:
        names = sorted(os.listdir(root))
    except OSError:
        names = []
    infos = [name for suffix in _METADATA for name in names if name.endswith(suffix)]
    chosen = [root / name for name in infos if _normal(_project(name)) in known]
    if not chosen:
        chosen = [root / name for name in infos if _installs(root / name, framework.package)]
    found = [
        distribution
        for info in chosen
        for distribution in _parse_metadata(_text_or_none(FolderTree(root=info), _METADATA[info.suffix]) or "")
    ]
    return tuple(sorted(found, key=lambda entry: known.index(name) if (name := _normal(entry.name)) in known else 99))


def _project(folder: str) -> str:
    """The project's name in the name of a metadata folder; a development egg has no version in its name."""
    return folder.rpartition(".")[0].partition("-")[0]


def _text_or_none(tree: Tree, relative: str) -> str | None:
    try:
        content = tree.read(relative)
        return None if content is None else decoded(content, relative)
    except LocateError:
        return None


def _installs(info: Path, package: str) -> bool:
    top_level = _text_or_none(FolderTree(root=info), "top_level.txt")
    if top_level is not None:
        return package in top_level.split()
    record = _text_or_none(FolderTree(root=info), "RECORD") or ""
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
