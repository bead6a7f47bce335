"""Whether a framework's loader can find kvmend at all: its metadata, its entry points, and who else is in the way."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import kvmend
from kvmend import registry
from kvmend.fix import Framework

_METADATA = (".dist-info", ".egg-info")


#: Entry points by `group` and `name`.
Select = Callable[..., importlib.metadata.EntryPoints]


def entry_points() -> Select:
    """Selects among the entry points that this interpreter sees; they are read once, which takes milliseconds."""
    return importlib.metadata.entry_points().select


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """One metadata folder of kvmend, as in `site-packages/kvmend-0.1.0.dist-info`."""

    path: Path
    version: str
    groups: frozenset[str]


def metadata_in(folders: Iterable[str | Path]) -> list[Metadata]:
    """Every metadata folder of kvmend in folders of packages, in the order in which the interpreter looks."""
    found: dict[Path, Metadata] = {}
    for folder in dict.fromkeys(Path(folder or ".") for folder in folders):
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            if name.endswith(_METADATA) and re.match(r"kvmend[-.]", name.lower()):
                path = folder / name
                found.setdefault(path.resolve(), _metadata(path))
    return list(found.values())


def _metadata(path: Path) -> Metadata:
    distribution = importlib.metadata.Distribution.at(path)
    try:
        version = distribution.version or "?"
    except Exception:  # no METADATA in it; each Python fails on that in its own way
        version = "?"
    groups = frozenset(point.group for point in distribution.entry_points if point.value.startswith("kvmend"))
    return Metadata(path=path, version=version, groups=groups)


def unregistered(framework: Framework, metadata: Sequence[Metadata], select: Select) -> str:
    """Why this interpreter's entry points do not lead the framework's loader to kvmend; "" if they do."""
    group = framework.plugin_group
    ours = select(group=group, name="kvmend")
    if not group or any(point.value.startswith("kvmend.") for point in ours):
        return ""
    taken = next((point.value for point in ours), None)
    if taken is not None:
        return f"the plugin named kvmend of the group {group} is {taken}, not kvmend's own: uninstall who registers it"
    if not metadata:
        return (
            f"{_nothing_installed()}: {framework.name} does not find it, install kvmend with pip into this environment"
        )
    first = metadata[0]
    good = [each for each in metadata[1:] if group in each.groups]
    end = f" and hides {good[0].path}: remove the former" if good else ": reinstall kvmend"
    return f"{first.path} (version {first.version}) registers nothing in {group}{end}"


def _nothing_installed() -> str:
    place = Path(kvmend.__file__).parent
    return f"kvmend was imported from {place}, but {sys.executable} has no metadata of it"


def own_problems(metadata: Sequence[Metadata], select: Select) -> list[tuple[str, bool]]:
    """What is wrong with this installation of kvmend, each with whether it keeps every fix away."""
    problems = []
    if len(metadata) > 1:
        places = ", ".join(str(each.path) for each in metadata)
        problems.append((f"kvmend is installed more than once, the first one counts: {places}", False))
    if metadata and metadata[0].version != kvmend.__version__:
        text = (
            f"{metadata[0].path} says version {metadata[0].version}, the kvmend imported from "
            f"{Path(kvmend.__file__).parent} is {kvmend.__version__}: reinstall kvmend"
        )
        problems.append((text, False))
    named = (group for each in metadata for group in each.groups if registry.holds_fixes(group))
    points = (point for group in {registry.GROUP, *named} for point in select(group=group))
    if not any(point.value.startswith("kvmend_fixes.") for point in points):
        where = str(metadata[0].path) if metadata else ""
        cause = f"{where} registers none of its fixes" if where else _nothing_installed()
        problems.append((f"{cause}: no fix of kvmend's own will be applied, reinstall kvmend", True))
    return problems


def command_elsewhere(framework: Framework) -> str:
    """Whose interpreter runs the framework's command, where that is another one than this; "" if nobody's."""
    script = shutil.which(framework.package)
    if script is None:
        return ""
    try:
        with open(script, "rb") as stream:
            first = stream.readline(512)
    except OSError:
        return ""
    interpreter = first[2:].strip().decode("utf-8", "replace")
    if not first.startswith(b"#!/") or os.path.dirname(interpreter) == os.path.dirname(sys.executable):
        return ""
    return f"the command {script} runs in {interpreter}, which this is not: run kvmend there"
