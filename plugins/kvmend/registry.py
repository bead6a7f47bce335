"""Discovery of fixes: the entry-point groups `kvmend.fixes` and `kvmend.fixes.PACKAGE`, which anybody may add to.

The second says which framework a fix is for, by its import package, so that the processes of others need not import it.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvmend.fix import Fix
from kvmend.record import record

GROUP = "kvmend.fixes"


@record(frozen=True, kw_only=True)
class BrokenFix:
    """An entry point that did not give a fix.

    Attributes:
        name: Name of the entry point.
        distribution: Who registered it, or "?".
        reason: One line.
    """

    name: str
    distribution: str
    reason: str


def holds_fixes(group: str) -> bool:
    """Whether fixes are registered in an entry-point group of this name."""
    return group == GROUP or group.startswith(f"{GROUP}.")


def discover(package: str | None = None) -> tuple[tuple[Fix, ...], tuple[BrokenFix, ...]]:
    """Registered fixes, in the order of their ids, and what could not be loaded.

    Args:
        package: Leave out what is registered for other frameworks than the one with this import package.
    """
    fixes: dict[str, Fix] = {}
    broken = []
    # One distribution seen twice on sys.path (an editable install beside a wheel) registers the same thing twice.
    points = {(point.name, point.value): point for point in _registered(package)}
    for point in sorted(points.values(), key=lambda each: each.name):
        try:
            fix = point.load()
            problem = _problem(point, fix, fixes)
        except Exception as error:  # a third party's import error must not keep the other fixes away
            problem = f"{type(error).__name__}: {error}"
        if problem:
            broken.append(BrokenFix(name=point.name, distribution=_owner(point), reason=problem))
        else:
            fixes[fix.id] = fix
    return tuple(fix for _, fix in sorted(fixes.items())), tuple(broken)


def _problem(point: importlib.metadata.EntryPoint, fix: object, others: Mapping[str, Fix]) -> str:
    if not isinstance(fix, Fix):
        return f"{point.value} is no kvmend.api.Fix"
    if point.group not in (GROUP, f"{GROUP}.{fix.framework.package}"):
        return f"it is registered in {point.group} and is for {fix.framework.package}"
    return f"id {fix.id} is registered twice" if fix.id in others else ""


def _registered(package: str | None) -> Iterator[importlib.metadata.EntryPoint]:
    """Entry points of the groups, first on `sys.path` first.

    As `importlib.metadata.entry_points` finds them, which parses what each of the hundreds of distributions beside a
    serving framework registers, in every process; here only those are parsed that name the group.
    """
    seen = set()
    for distribution in importlib.metadata.distributions():
        if _names_the_group(distribution):
            name = _name_of(distribution)
            if name is None or name not in seen:
                for point in distribution.entry_points:
                    if holds_fixes(point.group) and package in (None, point.group[len(GROUP) + 1 :] or package):
                        yield point
            seen.add(name)


def _names_the_group(distribution: importlib.metadata.Distribution) -> bool:
    """Whether the distribution registers something in a group of ours.

    Its own folder, where it has one, is read without `read_text`, which takes thrice as long with all its path objects.
    """
    folder = getattr(distribution, "_path", None)
    try:
        if isinstance(folder, Path):
            with open(f"{folder}/entry_points.txt", "rb", buffering=0) as file:
                return GROUP in file.readall().decode("utf-8")
        return GROUP in (distribution.read_text("entry_points.txt") or "")
    except (OSError, UnicodeDecodeError):
        return False


def _name_of(distribution: importlib.metadata.Distribution) -> str | None:
    """Its name in the normal form, or None where it has no metadata that says so.

    Read off the text: `Distribution.metadata` parses all of it, long description included, for milliseconds.
    """
    try:
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    except UnicodeDecodeError:
        return None
    header = text.partition("\n\n")[0].splitlines()
    name = next((line[len("Name:") :].strip() for line in header if line.startswith("Name:")), None)
    return None if name is None else re.sub(r"[-_.]+", "-", name).lower()


def _owner(point: importlib.metadata.EntryPoint) -> str:
    try:
        return str(point.dist.metadata["Name"]) if point.dist is not None else "?"
    except Exception:  # a dist-info folder without METADATA; each Python fails on it in its own way
        return "?"
