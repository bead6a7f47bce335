"""`kvmend fingerprint`: makes the tables of known sources from released files."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import click
from packaging.version import InvalidVersion, Version

from kvmend.cli.catalogue import fix_named
from kvmend.errors import UsageError
from kvmend.fingerprint import Generation, Table, dump_table, parse_table
from kvmend.fix import UNKNOWN, BodySource, Fix
from kvmend.judge import read_bodies
from kvmend.locate import Installation, locate_path


@click.command("fingerprint")
@click.argument("fix")
@click.argument("sources", nargs=-1, required=True, metavar="[RELEASE=]PATH...")
@click.option("--merge", "into", type=click.Path(path_type=Path), help="Add to this table and write it back.")
def fingerprint_command(fix: str, sources: tuple[str, ...], into: Path | None) -> None:
    """Fingerprints the bodies of FIX in wheels or folders; a folder without a version needs RELEASE=."""
    record = fix_named(fix)
    table = Table(fix=record.id, generations=())
    if into is not None and (into.exists() or into.is_symlink()):
        table = parse_table(_read(into), str(into))
    with _progress(sources) as items:
        for item in items:
            release, installation = _source(record, item)
            table = add(table, record, release, installation)
    text = dump_table(table)
    if into is None:
        click.echo(text, nl=False)
    else:
        _write(into, text)
        count = sum(len(generation.releases) for generation in table.generations)
        click.echo(f"{into}: {count} releases, {len(table.generations)} different sources")


def _read(into: Path) -> str:
    try:
        return into.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--merge {into}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _write(into: Path, text: str) -> None:
    """Writes the table, whole or not at all."""
    temporary = into.with_name(f".{into.name}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(into)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UsageError(f"--merge {into}: cannot be written: {error.strerror}") from error


def _progress(sources: tuple[str, ...]) -> contextlib.AbstractContextManager[Iterable[str]]:
    """The sources with a bar for whoever watches; standard output is the table's."""
    if not sys.stderr.isatty():
        return contextlib.nullcontext(sources)
    return click.progressbar(sources, label="reading", item_show_func=_shown, file=sys.stderr)


def _shown(item: str | None) -> str:
    return item or ""


def _source(fix: Fix, item: str) -> tuple[str, Installation]:
    release, separator, path = item.partition("=")
    if not separator:
        release, path = "", item
    installation = locate_path(fix.framework, Path(path))
    if installation is None:
        raise UsageError(f"{path}: no package {fix.framework.package!r} in it")
    release = release or installation.version or ""
    if not release:
        raise UsageError(f"{path}: has no version; write RELEASE={path}")
    return release, installation


def add(table: Table, fix: Fix, release: str, installation: Installation) -> Table:
    """The table with one more release; a release that is in it already is read anew.

    Args:
        table: The table so far.
        fix: Whose bodies to read.
        release: Name of the release or tree.
        installation: Its files.
    """
    fresh = _generation(fix, release, installation)
    kept = []
    for generation in table.generations:
        others = tuple(name for name in generation.releases if name != release)
        files = {name: digest for name, digest in generation.files.items() if name != release}
        if generation.bodies == fresh.bodies:
            releases = tuple(sorted({*others, release}, key=order))
            # A release whose finding is another one, if only in a fact, is not to be judged by its files.
            files = {**(files if _finding(generation) == _finding(fresh) else {}), **fresh.files}
            fresh = dataclasses.replace(fresh, releases=releases, files=dict(sorted(files.items(), key=_by_release)))
        elif others:
            kept.append(dataclasses.replace(generation, releases=others, files=files))
    ordered = sorted([*kept, fresh], key=lambda entry: order(entry.releases[0]))
    return Table(fix=fix.id, generations=tuple(ordered))


def _generation(fix: Fix, release: str, installation: Installation) -> Generation:
    """What is known of one release alone."""
    sources = _Noting(installation)
    finding = fix.probe(sources)
    modules = {body.module for body in fix.read}
    facts = json.loads(json.dumps(dict(finding.facts)))  # as the table will have them
    # The files alone tell the verdict only if there is one, it survives the table, and nothing else was read for it.
    told = finding.state != UNKNOWN and facts == finding.facts and sources.modules <= modules
    digest = installation.digest(modules) if told else ""
    return Generation(
        state=finding.state,
        features=finding.features,
        releases=(release,),
        bodies=read_bodies(fix, installation),
        reason=finding.reason,
        facts=facts,
        files={release: digest} if digest else {},
    )


class _Noting:
    """Sources that note which modules are asked for."""

    def __init__(self, installation: Installation) -> None:
        self.modules: set[str] = set()
        self._installation = installation

    def body(self, module: str, qualname: str) -> BodySource | None:
        self.modules.add(module)
        return self._installation.body(module, qualname)

    def text(self, module: str) -> str | None:
        self.modules.add(module)
        return self._installation.text(module)


def _finding(generation: Generation) -> tuple[object, ...]:
    return generation.state, generation.features, generation.reason, generation.facts


def _by_release(item: tuple[str, str]) -> tuple[int, Version, str]:
    return order(item[0])


def order(release: str) -> tuple[int, Version, str]:
    """Sort key of releases: versions first and in their order, names of trees after them."""
    try:
        return (0, Version(release), release)
    except InvalidVersion:
        return (1, Version("0"), release)
