"""Discovery of fixes: the entry-point group `kvmend.fixes`, which anybody may add to."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator

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


def discover() -> tuple[tuple[Fix, ...], tuple[BrokenFix, ...]]:
    """Every registered fix, in the order of their ids, and what could not be loaded."""
    fixes: dict[str, Fix] = {}
    broken = []
    # One distribution seen twice on sys.path (an editable install beside a wheel) registers the same thing twice.
    points = {(point.name, point.value): point for point in _registered()}
    for point in sorted(points.values(), key=lambda each: each.name):
        owner = _owner(point)
        try:
            fix = point.load()
        except Exception as error:  # a third party's import error must not keep the other fixes away
            broken.append(BrokenFix(name=point.name, distribution=owner, reason=f"{type(error).__name__}: {error}"))
            continue
        if not isinstance(fix, Fix):
            broken.append(BrokenFix(name=point.name, distribution=owner, reason=f"{point.value} is no kvmend.api.Fix"))
        elif fix.id in fixes:
            broken.append(BrokenFix(name=point.name, distribution=owner, reason=f"id {fix.id} is registered twice"))
        else:
            fixes[fix.id] = fix
    return tuple(fix for _, fix in sorted(fixes.items())), tuple(broken)


def _registered() -> Iterator[importlib.metadata.EntryPoint]:
    """Entry points of the group, first on `sys.path` first.

    As `importlib.metadata.entry_points` finds them, which parses what each of the hundreds of distributions beside a
    serving framework registers, in every process; here only those are parsed that name the group.
    """
    seen = set()
    for distribution in importlib.metadata.distributions():
        try:
            named = GROUP in (distribution.read_text("entry_points.txt") or "")
        except UnicodeDecodeError:
            continue
        if named:
            name = _name_of(distribution)
            if name is None or name not in seen:
                yield from distribution.entry_points.select(group=GROUP)
            seen.add(name)


def _name_of(distribution: importlib.metadata.Distribution) -> str | None:
    """Its name, or None where it has no metadata that says so; each Python fails on that in its own way."""
    try:
        return re.sub(r"[-_.]+", "-", str(distribution.metadata["Name"])).lower()
    except Exception:
        return None


def _owner(point: importlib.metadata.EntryPoint) -> str:
    try:
        return str(point.dist.metadata["Name"]) if point.dist is not None else "?"
    except Exception:  # a dist-info folder without METADATA; each Python fails on it in its own way
        return "?"
