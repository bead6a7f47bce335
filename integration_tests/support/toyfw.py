"""A toy framework: a small importable package in several releases, installed in every way a real one can be."""

from __future__ import annotations

import textwrap
import zipfile
from collections.abc import Mapping
from pathlib import Path

ENGINE = '''\
"""Requests are looked up, then admitted."""


class Engine:
    """The toy engine."""

    lookups = 0
    admissions = 0

    def lookup(self, request):
        """Counts every lookup."""
        self.lookups += 1
        return f"found {request}"

    def admit(self, request, limit=4):
        return len(request) < limit

    @staticmethod
    def size(request):
        return len(request)

    @classmethod
    def build(cls):
        return cls()


def tick(engine):
    return engine.lookups
'''

CACHE = """\
class Cache:
    def get(self, key):
        return f"cached {key}"


def flush(cache):
    return "flushed"
"""

_COUNTED = "        self.lookups += 1\n"
#: Release to modules. 1.0 and 1.1 count at the lookup (affected), 2.0 at the admission (fixed), 3.0 counts nothing.
RELEASES: Mapping[str, Mapping[str, str]] = {
    "1.0": {"engine": ENGINE, "cache": CACHE},
    "1.1": {"engine": ENGINE.replace("limit=4", "limit=8"), "cache": CACHE},
    "2.0": {
        "engine": ENGINE.replace(_COUNTED, "").replace(
            "        return len(request) < limit", "        self.admissions += 1\n        return len(request) < limit"
        ),
        "cache": CACHE,
    },
    "3.0": {"engine": ENGINE.replace(_COUNTED, ""), "cache": CACHE},
}


def modules_of(release: str, changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Path below the root to text, for one release; `changes` replaces or adds modules by name."""
    modules = dict(RELEASES[release]) | dict(changes or {})
    init = modules.pop("__init__", f'__version__ = "{release}"\n')
    return {"toyfw/__init__.py": init} | {f"toyfw/{name}.py": text for name, text in modules.items()}


def write_release(
    root: Path, release: str = "1.0", *, dist: str | None = "toyfw", changes: Mapping[str, str] | None = None
) -> Path:
    """Puts a release into a folder, with a dist-info of the name `dist` unless that is None; returns the package."""
    for relative, text in modules_of(release, changes).items():
        file = root / relative
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    if dist is not None:
        write_dist_info(root, dist, release)
    return root / "toyfw"


def write_dist_info(root: Path, dist: str, version: str, files: Mapping[str, str] | None = None) -> Path:
    """A dist-info folder with METADATA and, by name, further files."""
    info = root / f"{dist.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n", encoding="utf-8")
    for name, text in (files or {}).items():
        (info / name).write_text(text, encoding="utf-8")
    return info


def write_wheel(
    folder: Path, release: str = "1.0", *, dist: str = "toyfw", changes: Mapping[str, str] | None = None
) -> Path:
    """A wheel of a release."""
    path = folder / f"{dist.replace('-', '_')}-{release}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for relative, text in modules_of(release, changes).items():
            archive.writestr(relative, text)
        metadata = f"Metadata-Version: 2.1\nName: {dist}\nVersion: {release}\n\nName: not this\n"
        archive.writestr(f"{dist.replace('-', '_')}-{release}.dist-info/METADATA", metadata)
    return path


def write_module(root: Path, name: str, text: str) -> None:
    """A module of somebody else beside the framework."""
    (root / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")


def register_fix(
    root: Path,
    expression: str = "make_fix()",
    *,
    name: str = "toy-count",
    dist: str = "toy-fixes",
    group: str = "kvmend.fixes",
) -> None:
    """A distribution that registers one fix in a group; the expression may use `support.toyfix`."""
    module = dist.replace("-", "_")
    write_module(root, module, f"from support.toyfix import *\nFIX = {expression}\n")
    write_dist_info(root, dist, "1.0", {"entry_points.txt": f"[{group}]\n{name} = {module}:FIX\n"})
