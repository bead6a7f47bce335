"""Fingerprints of source bodies, and the tables of known ones.

A fingerprint is a hash of the syntax tree in a canonical form: comments, blank lines, layout and docstrings do
not count, every other token does, and CPython 3.10 to 3.14 agree on it although their `ast.dump` does not.
"""

from __future__ import annotations

import ast
import hashlib
import json
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Any

from kvmend.errors import FingerprintError
from kvmend.fix import STATES
from kvmend.record import record

SCHEMA = 1
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
#: Fields that say how a thing was written or used, not what it is.
_IGNORED = frozenset({"ctx", "kind", "type_comment", "type_ignores"})


def fingerprint(tree: ast.AST) -> str:
    """16 hex digits that identify what a syntax tree does.

    Args:
        tree: Any node; a body's FunctionDef or ClassDef in practice.
    """
    parts: list[str] = []
    _canonical(tree, parts.append)
    return hashlib.sha256("".join(parts).encode("ascii")).hexdigest()[:16]


def _canonical(value: Any, put: Callable[[str], None]) -> None:
    # Every process of a server comes through here ten thousand times and more at its start.
    if isinstance(value, ast.Constant):
        # ascii(), because repr() of a str follows the interpreter's own Unicode tables.
        put(f"<{type(value.value).__name__} {value.value!a}>")
    elif isinstance(value, ast.JoinedStr):
        put("(JoinedStr")
        for part in _joined(value):
            _canonical(part, put)
        put(")")
    elif isinstance(value, ast.AST):
        put(f"({type(value).__name__}")
        for name in value._fields:
            if name in _IGNORED:
                continue
            child: Any = getattr(value, name, None)
            if name == "body" and isinstance(value, _DOCUMENTED):
                child = child[1:] if _is_docstring(child) else child
            # Absent optional fields are left out, so that a field a later CPython adds (type_params) changes nothing.
            if child is None or child == []:
                continue
            put(f" {name}=")
            _canonical(child, put)
        put(")")
    elif isinstance(value, list):
        put("[")
        for item in value:
            _canonical(item, put)
            put(",")
        put("]")
    else:
        put(ascii(value))


def _is_docstring(body: list[ast.stmt]) -> bool:
    return bool(
        body
        and isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and isinstance(body[0].value.value, str)
    )


def _joined(node: ast.JoinedStr) -> Iterator[ast.expr]:
    """Parts of an f-string with neighbouring literals merged: CPython splits them differently from 3.12 on."""
    literal = ""
    for part in node.values:
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            literal += part.value
            continue
        if literal:
            yield ast.Constant(literal)
            literal = ""
        yield part
    if literal:
        yield ast.Constant(literal)


@record(frozen=True, kw_only=True)
class Generation:
    """One known source: the fingerprints of every body, the releases that have exactly them, and the verdict.

    Attributes:
        state: As in `Finding.state`.
        features: As in `Finding.features`.
        releases: Release or tree names, oldest first.
        bodies: `module:qualname` to fingerprint, or None where the release lacks the body.
        reason: As in `Finding.reason`.
        facts: As in `Finding.facts`.
        files: Release to the digest of its files, see `Installation.digest`: of those releases whose finding is exactly
            the one here, and rests on the bodies' files alone.
    """

    state: str
    features: frozenset[str]
    releases: tuple[str, ...]
    bodies: Mapping[str, str | None]
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@record(frozen=True, kw_only=True)
class Table:
    """Every known source of one fix."""

    fix: str
    generations: tuple[Generation, ...]

    def match(self, bodies: Mapping[str, str | None]) -> Generation | None:
        """The generation whose bodies are exactly these."""
        for generation in self.generations:
            if generation.bodies == bodies:
                return generation
        return None

    def match_files(self, digest: str) -> Generation | None:
        """The generation of a release whose files have this digest."""
        if digest:
            for generation in self.generations:
                if digest in generation.files.values():
                    return generation
        return None

    def releases_of(self, key: str, fingerprint: str) -> tuple[str, ...]:
        """Every release whose body `key` has this fingerprint, oldest first."""
        return tuple(
            release
            for generation in self.generations
            if generation.bodies.get(key) == fingerprint
            for release in generation.releases
        )


def load_table(where: str) -> Table:
    """Reads a table from a package.

    Args:
        where: "package:file.json", as in `Fix.fingerprints`.

    Raises:
        FingerprintError: The table is missing or malformed; the message names the file and the place in it.
    """
    package, _, name = where.partition(":")
    try:
        content = pkgutil.get_data(package, name)
        if content is None:
            raise ModuleNotFoundError(f"No module named {package!r}")
        text = content.decode("utf-8")
    except (OSError, ImportError, TypeError, ValueError) as error:  # no package, no file, not UTF-8
        raise FingerprintError(f"table of known sources {where} cannot be read: {error}") from error
    return parse_table(text, where)


def parse_table(text: str, where: str) -> Table:
    """Parses a table; see `load_table`."""
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise FingerprintError(f"{where}: schema {data['schema']!r} is not {SCHEMA}")
        generations = []
        for number, entry in enumerate(data["generations"]):
            if entry["state"] not in STATES:
                raise FingerprintError(f"{where}: generations[{number}].state {entry['state']!r} is not known")
            if not entry["releases"] or not isinstance(entry["bodies"], dict):
                raise FingerprintError(f"{where}: generations[{number}] needs a release and a mapping of bodies")
            generations.append(
                Generation(
                    state=entry["state"],
                    features=frozenset(entry["features"]),
                    releases=tuple(entry["releases"]),
                    bodies=entry["bodies"],
                    reason=entry.get("reason", ""),
                    facts=dict(entry.get("facts", {})),
                    files=dict(entry.get("files", {})),
                )
            )
        return Table(fix=data["fix"], generations=tuple(generations))
    except (ValueError, KeyError, TypeError) as error:
        raise FingerprintError(f"{where} is not a table of known sources: {error!r}") from error


def dump_table(table: Table) -> str:
    """A table as JSON text with a stable order, ready to be committed."""
    generations = [
        {
            "releases": list(entry.releases),
            "state": entry.state,
            "features": sorted(entry.features),
            "bodies": dict(sorted(entry.bodies.items())),
            **({"reason": entry.reason, "facts": dict(entry.facts), "files": dict(entry.files)} if entry.files else {}),
        }
        for entry in table.generations
    ]
    return json.dumps({"schema": SCHEMA, "fix": table.fix, "generations": generations}, indent=1) + "\n"
