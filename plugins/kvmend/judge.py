"""The verdict on an installation's source: fingerprints against the known ones, then the fix's own probe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from kvmend.errors import FingerprintError
from kvmend.fingerprint import Generation, Table, load_table
from kvmend.fix import AFFECTED, UNKNOWN, Finding, Fix
from kvmend.locate import Installation
from kvmend.outcome import Evidence
from kvmend.record import record


@record(frozen=True, kw_only=True)
class Judgement:
    """What the source of an installation is, for one fix.

    Attributes:
        state: As in `Finding.state`; "unknown" wherever the exact source is in no table.
        reason: One line.
        features: As found by the probe.
        facts: As found by the probe.
        evidence: What was read, body by body.
        known_as: Releases whose source is exactly this one; empty if unknown.
        probed: What the probe alone says; decides whether `force` may go ahead.
    """

    state: str
    reason: str
    features: frozenset[str] = frozenset()
    facts: Mapping[str, Any] = field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()
    known_as: tuple[str, ...] = ()
    probed: str = UNKNOWN


def read_bodies(fix: Fix, installation: Installation) -> dict[str, str | None]:
    """Fingerprint of every body of the fix, by `module:qualname`; None where the body is not there."""
    found = {}
    for body in fix.read:
        source = installation.body(body.module, body.qualname)
        found[body.key] = source.fingerprint if source else None
    return found


_NOBODY: tuple[str, ...] = ()


def judge(fix: Fix, installation: Installation, *, by_files: bool = False) -> Judgement:
    """Judges an installation for a fix. Reads files, imports nothing, never raises for what it reads.

    A known source must also convince the probe, so a wrong table cannot make a fix touch what it does not
    understand; an unknown source is "unknown" whatever the probe makes of it.

    Args:
        fix: The fix.
        installation: Where the framework is.
        by_files: Take files that are byte for byte those of a release for what the table says of it. Parsing and
            probing them takes tens of milliseconds, and was done when the table was made. Line numbers are left out.
    """
    table, table_error = Table(fix=fix.id, generations=()), ""
    if fix.fingerprints:
        try:
            table = load_table(fix.fingerprints)
        except FingerprintError as error:
            table_error = str(error)
    if by_files and (known := _judge_files(fix, installation, table)) is not None:
        return known
    bodies = read_bodies(fix, installation)
    evidence = tuple(_evidence(fix, installation, table, key, value) for key, value in bodies.items())
    try:
        finding = fix.probe(installation)
        if not isinstance(finding, Finding):
            raise TypeError(f"{finding!r} is no Finding")
    except Exception as error:  # a probe of a third party must not take a server down
        finding = Finding(state=UNKNOWN, reason=f"the probe failed: {type(error).__name__}: {error}")
    generation = table.match(bodies)
    state, known_as = finding.state, _NOBODY
    unreadable = _unreadable(fix, installation, bodies, parse=generation is None)
    if unreadable:
        # Whatever is in there, a probe takes it for absent and may call the fault so too.
        state, reason = UNKNOWN, unreadable
    elif generation is not None:
        known_as = generation.releases
        agreed = (finding.state, finding.features) == (generation.state, generation.features)
        state = generation.state if agreed else UNKNOWN
        reason = (
            f"source is that of {_name(known_as)}; {finding.reason}"
            if agreed
            else f"source is that of {_name(known_as)}, yet the probe reads it as {finding.state}: {finding.reason}"
        )
    elif not any(bodies.values()):
        state, reason = finding.state, finding.reason
    elif not fix.fingerprints:
        reason = finding.reason
    else:
        state = UNKNOWN
        reason = table_error or _difference(installation, table, evidence, finding)
    return Judgement(
        state=state,
        reason=reason,
        features=finding.features,
        facts=dict(finding.facts),
        evidence=evidence,
        known_as=known_as,
        probed=finding.state,
    )


def _judge_files(fix: Fix, installation: Installation, table: Table) -> Judgement | None:
    """What the table says of files that are a release's, or None where they are nobody's."""
    if not any(generation.files for generation in table.generations):
        return None
    generation = table.match_files(installation.digest(body.module for body in fix.read))
    if generation is None or set(generation.bodies) != {body.key for body in fix.read}:
        return None
    evidence = tuple(
        Evidence(
            body=body.key,
            path=installation.path(body.module),
            line=None,
            fingerprint=(fingerprint := generation.bodies[body.key]),
            known_as=table.releases_of(body.key, fingerprint) if fingerprint else (),
        )
        for body in {body.key: body for body in fix.read}.values()
    )
    return Judgement(
        state=generation.state,
        reason=f"source is that of {_name(generation.releases)}; {generation.reason}",
        features=generation.features,
        facts=generation.facts,
        evidence=evidence,
        known_as=generation.releases,
        probed=generation.state,
    )


def may_force(judgement: Judgement) -> bool:
    """Whether an unknown source can be mended on the operator's word: the probe must still recognise the fault."""
    return judgement.probed == AFFECTED


def _evidence(fix: Fix, installation: Installation, table: Table, key: str, value: str | None) -> Evidence:
    module, _, qualname = key.partition(":")
    source = installation.body(module, qualname)
    if source is None:
        return Evidence(body=key, path=installation.path(module), line=None, fingerprint=None)
    return Evidence(
        body=key,
        path=source.path,
        line=source.line,
        fingerprint=value,
        known_as=table.releases_of(key, source.fingerprint),
    )


def _name(releases: tuple[str, ...]) -> str:
    return releases[0] if len(releases) == 1 else f"{releases[0]} – {releases[-1]}"


def _unreadable(fix: Fix, installation: Installation, bodies: Mapping[str, str | None], *, parse: bool) -> str:
    """Why a body that was not found may be there all the same, or "" if it is not. Parsing takes milliseconds."""
    modules = dict.fromkeys(body.module for body in fix.read if bodies[body.key] is None)
    return next((trouble for module in modules if (trouble := installation.trouble(module, parse=parse))), "")


def _difference(installation: Installation, table: Table, evidence: tuple[Evidence, ...], finding: Finding) -> str:
    """Names the first body that no known release has, since that is where the reader must look."""
    looks = f"its structure looks {finding.state.replace('_', ' ')}: {finding.reason}"
    for entry in evidence:
        if entry.fingerprint is not None and not entry.known_as:
            return f"{entry.body} ({entry.path}:{entry.line}) is that of no known release; {looks}"
    nearest = max(table.generations, key=lambda each: _shared(each, evidence), default=None)
    if nearest is None:
        return f"the table of known sources is empty; {looks}"
    name = _name(nearest.releases)
    entry = next(entry for entry in evidence if nearest.bodies.get(entry.body) != entry.fingerprint)
    if entry.fingerprint is None:
        return f"{_absent(installation, entry)}, which the nearest known source, that of {name}, has; {looks}"
    whose = f"that of {_name(entry.known_as)}"
    if nearest.bodies.get(entry.body) is None:
        whose += ", and absent there"
    return (
        f"no release has this combination of bodies: most are those of {name}, "
        f"{entry.body} ({entry.path}:{entry.line}) is {whose}; {looks}"
    )


def _shared(generation: Generation, evidence: tuple[Evidence, ...]) -> int:
    return sum(generation.bodies.get(entry.body) == entry.fingerprint for entry in evidence)


def _absent(installation: Installation, entry: Evidence) -> str:
    """In which way a body is not there."""
    module, _, qualname = entry.body.partition(":")
    if entry.path is None:
        return f"{installation.location} has no module {module}, hence no {qualname}"
    return f"{entry.path} has no {qualname}"
