"""What the package index has that the tables of known sources do not: one row for each new release and fix.

Run as `python -m upstream.drift`; nox does. Exit code 0 if every new release has a source that is known already (or
there is none), 1 if one has not, which is when a table, and perhaps a fix, wants work.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from packaging.version import Version
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from kvmend.cli.catalogue import all_fixes
from kvmend.fingerprint import Generation, Table, load_table
from kvmend.fix import AFFECTED, FIXED, Fix
from kvmend.judge import judge, read_bodies
from kvmend.locate import locate_path
from upstream.known_sources import released, wheel

OLDEST = Version("0.8.5")
#: Frameworks whose releases are on the package index under the names that their record knows.
PACKAGES = ("vllm",)

KNOWN, UNKNOWN, NATIVE, UNREADABLE = "known source", "unknown source", "native fix", "no source"


class Index(Protocol):
    """Where releases come from."""

    def released(self, distribution: str) -> list[Version]:
        """Every release of a distribution, oldest first."""

    def wheel(self, distribution: str, version: Version, into: str) -> Path:
        """A wheel of a release, in a folder."""


class PackageIndex:
    """The package index that pip is set up for."""

    def released(self, distribution: str) -> list[Version]:
        """See `Index.released`."""
        return released(distribution, OLDEST, None)

    def wheel(self, distribution: str, version: Version, into: str) -> Path:
        """See `Index.wheel`."""
        return wheel(distribution, version, into)


@dataclass(frozen=True, kw_only=True)
class News:
    """What a new release is to a fix.

    Attributes:
        release: "distribution version".
        fix: The fix's id.
        verdict: "known source", "unknown source", "native fix" (of a fault that the release before had), or
            "no source" for a wheel that cannot be had or has no such package.
        probed: What the fix's probe says of it: "affected", "fixed", ...
        moved: Bodies that differ from those of the nearest known release at or below, with what happened to each.
        against: That release, or those that the source is known from.
        remark: One line.
    """

    release: str
    fix: str
    verdict: str
    probed: str = ""
    moved: tuple[str, ...] = ()
    against: str = ""
    remark: str = ""

    @property
    def new(self) -> bool:
        """Whether somebody has to look."""
        return self.verdict != KNOWN


def listed(table: Table) -> dict[Version, Generation]:
    """Every release that a table of known sources names, with its source."""
    return {Version(name): generation for generation in table.generations for name in generation.releases}


def unlisted(table: Table, versions: Sequence[Version]) -> list[Version]:
    """Those releases that a table does not name; what is older than all of it is none of its business."""
    known = listed(table)
    oldest = min(known, default=OLDEST)
    return [version for version in versions if version not in known and version >= oldest]


def nearest(table: Table, version: Version) -> tuple[Version, Generation] | None:
    """The newest known release below a version, and its source."""
    return max((entry for entry in listed(table).items() if entry[0] <= version), default=None, key=lambda e: e[0])


def look(fix: Fix, table: Table, distribution: str, version: Version, path: Path) -> News:
    """Compares a wheel with what is known."""
    release = f"{distribution} {version}"
    installation = locate_path(fix.framework, path)
    if installation is None:
        remark = f"the wheel has no package {fix.framework.package}"
        return News(release=release, fix=fix.id, verdict=UNREADABLE, remark=remark)
    found, bodies, before = judge(fix, installation), read_bodies(fix, installation), nearest(table, version)
    if found.known_as:
        span = found.known_as[0] if len(found.known_as) == 1 else f"{found.known_as[0]} – {found.known_as[-1]}"
        verdict = KNOWN if found.state == found.probed else UNKNOWN
        return News(
            release=release, fix=fix.id, verdict=verdict, probed=found.probed, against=span, remark=found.reason
        )
    name, generation = before if before else ("", Generation(state="", features=frozenset(), releases=(), bodies={}))
    return News(
        release=release,
        fix=fix.id,
        verdict=NATIVE if found.probed == FIXED and generation.state == AFFECTED else UNKNOWN,
        probed=found.probed,
        moved=tuple(_moved(bodies, generation.bodies)),
        against=str(name),
        # Without the place in a wheel that is gone again.
        remark=found.reason.rpartition("its structure ")[2],
    )


def _moved(now: Mapping[str, str | None], before: Mapping[str, str | None]) -> Iterator[str]:
    for key, value in now.items():
        old = before.get(key)
        if value != old:
            what = "is gone" if value is None else "is new" if old is None else "differs"
            yield f"{key.partition(':')[2]} {what}"


def news(fixes: Sequence[Fix], index: Index, console: Console) -> list[News]:
    """Every release that a table does not name, for every fix; a wheel is downloaded once for all of them."""
    tables = {fix.id: load_table(fix.fingerprints) for fix in fixes if fix.fingerprints}
    found = []
    for distribution in dict.fromkeys(name for fix in fixes for name in fix.framework.distributions):
        mine = [fix for fix in fixes if fix.id in tables and distribution in fix.framework.distributions]
        versions = index.released(distribution)
        wanted = {fix.id: set(unlisted(tables[fix.id], versions)) for fix in mine}
        for version in sorted(set().union(*wanted.values())):
            with (
                console.status(f"{distribution} {version}"),
                tempfile.TemporaryDirectory(prefix="kvmend-drift-") as folder,
            ):
                concerned = [fix for fix in mine if version in wanted[fix.id]]
                try:
                    path = index.wheel(distribution, version, folder)
                except (OSError, ValueError, subprocess.SubprocessError) as error:
                    found += [_no_wheel(fix, distribution, version, error) for fix in concerned]
                    continue
                found += [look(fix, tables[fix.id], distribution, version, path) for fix in concerned]
    return found


def _no_wheel(fix: Fix, distribution: str, version: Version, error: Exception) -> News:
    return News(release=f"{distribution} {version}", fix=fix.id, verdict=UNREADABLE, remark=f"no wheel: {error}")


def grid(found: Sequence[News]) -> Grid:
    """The table that is printed."""
    table = Grid(box=None, header_style="bold", pad_edge=False)
    for heading in ("release", "fix", "what it is", "its probe says", "what moved", "since / known from", "remark"):
        table.add_column(heading, overflow="fold")
    for each in found:
        style = "green" if not each.new else "yellow" if each.verdict == NATIVE else "red"
        verdict = Text(each.verdict, style=style)
        cells = (each.probed.replace("_", " "), "\n".join(each.moved), each.against, each.remark)
        table.add_row(each.release, each.fix, verdict, *map(Text, cells))
    return table


def main(
    arguments: Sequence[str], fixes: Sequence[Fix] | None = None, index: Index | None = None, width: int | None = None
) -> int:
    """Looks and prints; 1 if there is anything that somebody has to look at."""
    parser = argparse.ArgumentParser(prog="nox -s drift --", description=(__doc__ or "").partition("\n")[0])
    parser.parse_args(arguments)
    console = Console(width=width, highlight=False)
    if fixes is None:
        fixes = [fix for fix in all_fixes() if fix.fingerprints and fix.framework.package in PACKAGES]
    found = news(fixes, index or PackageIndex(), console)
    if not found:
        console.print("Nothing new: every release on the package index is in the tables of known sources.")
        return 0
    console.print(grid(found))
    return 1 if any(each.new for each in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
