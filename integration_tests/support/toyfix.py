"""Toy fixes on the toy framework, and the table of its known releases."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvmend.api import (
    AFFECTED,
    FIXED,
    NOT_AFFECTED,
    UNKNOWN,
    Body,
    Case,
    Context,
    Finding,
    Fix,
    Framework,
    Site,
    Sources,
)
from support.toyfw import RELEASES, write_release

__all__ = ["CACHE", "ENGINE", "TOYFW", "boom", "make_fix", "measure", "not_callable", "site", "tag", "write_table"]

TOYFW = Framework(name="ToyFW", package="toyfw", distributions=("toyfw", "toyfw-cpu"), logger="toyfw")
ENGINE, CACHE = "toyfw.engine", "toyfw.cache"


def tag(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """A wrapper that shows in the result how often it is there, and counts its calls."""
    counters: Any = context.counters

    @functools.wraps(original)
    def tagged(*args: Any, **kwargs: Any) -> Any:
        counters.calls += 1
        result = original(*args, **kwargs)
        return f"{result} +kvmend" if isinstance(result, str) else result

    return tagged


def boom(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """A wrapper factory that fails."""
    raise RuntimeError("the factory does not like this")


def not_callable(original: Callable[..., Any], context: Context) -> Any:
    """A wrapper factory that gives no function."""
    return 42


def site(qualname: str, module: str = ENGINE, wrap: Any = tag, **options: Any) -> Site:
    """A site in the toy framework."""
    return Site(module=module, qualname=qualname, wrap=wrap, **options)


def probe(sources: Sources) -> Finding:
    """Affected: the lookup counts; fixed: the admission does; not affected: nobody does."""
    lookup, admit = sources.body(ENGINE, "Engine.lookup"), sources.body(ENGINE, "Engine.admit")
    if lookup is None or admit is None:
        return Finding(state=UNKNOWN, reason="there is no lookup or no admission")
    if "self.lookups += 1" in lookup.text:
        return Finding(state=AFFECTED, reason="the lookup counts", facts={"line": lookup.line})
    if "self.admissions += 1" in admit.text:
        return Finding(state=FIXED, reason="the admission counts")
    return Finding(state=NOT_AFFECTED, reason="nothing is counted")


def make_fix(*sites: Site, **changes: Any) -> Fix:
    """The fix `toy-count`; its site is `Engine.lookup` unless others are given."""
    fields: dict[str, Any] = {
        "id": "toy-count",
        "switch": "KVMEND_TOY_COUNT",
        "framework": TOYFW,
        "summary": "Lookups are counted once.",
        "why": "Symptom: wrong counts.\n\nTrigger: any lookup.",
        "how": "It wraps the lookup.",
        "remove_when": "ToyFW is 2.0 or later.",
        "upstream": ("https://example.org/toyfw/1",),
        "sites": sites or (site("Engine.lookup"),),
        "bodies": (Body(module=ENGINE, qualname="Engine.admit"),),
        "probe": probe,
        "counters": {"calls": "calls seen"},
        "releases": "1.0 - 1.1",
    }
    return Fix(**(fields | changes))


def write_table(root: Path, fix: Fix, *releases: str) -> str:
    """Fingerprints releases into a package `toytables` in `root`; returns what `Fix.fingerprints` says of it."""
    # Here, because fresh interpreters import this module for the fix alone.
    import tempfile

    from kvmend.cli.fingerprint import add
    from kvmend.fingerprint import Table, dump_table
    from kvmend.locate import locate_path

    table = Table(fix=fix.id, generations=())
    for release in releases or RELEASES:
        with tempfile.TemporaryDirectory() as folder:
            write_release(Path(folder), release)
            installation = locate_path(TOYFW, Path(folder))
            assert installation is not None
            table = add(table, fix, release, installation)
    package = root / "toytables"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / f"{fix.id}.json").write_text(dump_table(table), encoding="utf-8")
    return f"toytables:{fix.id}.json"


def measure() -> list[Case]:
    """A proof of the toy fix: what a lookup says."""
    import toyfw.engine  # type: ignore[import-not-found]

    found = toyfw.engine.Engine().lookup("a")
    return [Case(name="a lookup is mended", expected="found a +kvmend", measured=found)]
