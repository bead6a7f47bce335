"""What a fix is: frozen records and the small types its functions speak in.

A fix declares the source it reads, a probe that judges that source, the sites it wraps and one wrapper
factory for each site. It knows nothing of loading, switches, locks or reports; see `kvmend.api`.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Protocol

from kvmend.counters import Counters
from kvmend.errors import FixDeclarationError
from kvmend.record import record

#: A wrapper factory: takes the object in place and the context, returns the object to put there.
Wrap = Callable[[Callable[..., Any], "Context"], Callable[..., Any]]
#: A probe: takes the installed source of the fix's bodies, says in which state it is.
Probe = Callable[["Sources"], "Finding"]

AFFECTED = "affected"
FIXED = "fixed"
NOT_AFFECTED = "not_affected"
UNKNOWN = "unknown"
STATES = (AFFECTED, FIXED, NOT_AFFECTED, UNKNOWN)

_ID = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)+")
_SWITCH = re.compile(r"KVMEND_[A-Z0-9_]+")


@record(frozen=True, kw_only=True)
class Role:
    """What a process is to its framework.

    Attributes:
        name: As in "API server", "EngineCore" or "worker".
        rank: Which of several alike, or None.
        node: "prefill", "decode" or "mixed" where prefill and decode are told apart, "" where they are not.
    """

    name: str
    rank: int | None = None
    node: str = ""


@record(frozen=True, kw_only=True)
class Framework:
    """A serving framework that fixes can be for.

    Attributes:
        name: How people call it, as in "vLLM".
        package: The import package, as in "vllm".
        distributions: Distribution names that are known to provide the package, the usual one first.
        logger: Name of the logger whose output looks like the framework's own, or a function that finds it among
            those there are: names and set-up differ between releases.
        processes: Which processes load the plugin, in a few words.
        unloadable: Why the framework's own plugin loader would leave kvmend out, one line per reason, from the
            environment variables and the installed source; None if its loader takes everything.
        plugin_group: Entry-point group that the framework's loader reads kvmend from; "" if there is none.
        plugin_list: Environment variable with the plugins that this loader takes; "" if there is none.
        role: What this process is, from its command line, its environment variables and the name that
            `multiprocessing` has for it; asked whenever a report is written. None if nobody knows.
    """

    name: str
    package: str
    distributions: tuple[str, ...]
    logger: str | Callable[[], str]
    processes: str = ""
    unloadable: Callable[[Mapping[str, str], Sources], tuple[str, ...]] | None = None
    plugin_group: str = ""
    plugin_list: str = ""
    role: Callable[[Sequence[str], Mapping[str, str], str], Role] | None = None

    def log(self) -> logging.Logger:
        """The logger for whatever kvmend says in the framework's processes."""
        return logging.getLogger(f"{self.logger if isinstance(self.logger, str) else self.logger()}.kvmend")


@record(frozen=True, kw_only=True)
class Body:
    """A function or class whose source the fix relies on, whether or not it wraps it.

    Attributes:
        module: Dotted module name, as in "vllm.v1.core.kv_cache_manager".
        qualname: Qualified name in the module, as in "KVCacheManager.allocate_slots".
    """

    module: str
    qualname: str

    @property
    def key(self) -> str:
        """`module:qualname`, the name used in fingerprint tables, reports and messages."""
        return f"{self.module}:{self.qualname}"


@record(frozen=True, kw_only=True)
class Site(Body):
    """A body that the fix wraps.

    Attributes:
        wrap: Factory of the wrapper. Called once per application, under the applier's lock.
        features: The site is wrapped only if the finding has all of these features.
        modes: The site is wrapped only in these modes; empty means in every mode.
        optional: The fix does without where somebody has put something else there that does not call the original,
            or another class in the place of the one that has it; elsewhere that is a conflict.
    """

    wrap: Wrap
    features: frozenset[str] = frozenset()
    modes: frozenset[str] = frozenset()
    optional: bool = False

    def wanted(self, mode: str, features: frozenset[str]) -> bool:
        """Whether this site takes part for a mode and the features found in the source."""
        return self.features <= features and (not self.modes or mode in self.modes)


@record(frozen=True, kw_only=True)
class BodySource:
    """The installed source of one body.

    Attributes:
        key: `module:qualname`.
        path: The file, as the user would open it (inside a wheel: `wheel!/member`).
        line: 1-based line of the `def` or `class`.
        text: The lines of the body, decorators included.
        tree: Its syntax tree: a FunctionDef, AsyncFunctionDef or ClassDef.
        fingerprint: 16 hex digits, see `kvmend.fingerprint`.
    """

    key: str
    path: str
    line: int
    text: str
    tree: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    fingerprint: str


class Sources(Protocol):
    """Read access to an installation's source; nothing is imported."""

    def body(self, module: str, qualname: str) -> BodySource | None:
        """The source of a body, or None if the module or the name is not there."""

    def text(self, module: str) -> str | None:
        """The whole source of a module, or None if it is not there."""


@record(frozen=True, kw_only=True)
class Finding:
    """What a probe says of an installation's source.

    Attributes:
        state: One of "affected", "fixed", "not_affected", "unknown".
        reason: One sentence, in the field's terms.
        features: What the wrappers must know of this source, e.g. {"inline-lookup"}.
        facts: Small JSON-able values read off the source, handed to the wrappers and printed by `kvmend check`.
    """

    state: str
    reason: str
    features: frozenset[str] = frozenset()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise FixDeclarationError(f"finding state {self.state!r} is none of {', '.join(STATES)}")


def _nobody_looks(made: type) -> None:
    """What a context does with a class where no host is behind it."""


@record(frozen=True, kw_only=True)
class Context:
    """What a wrapper factory gets beside the object in place.

    Attributes:
        mode: The mode in force: "1" or one of the fix's own modes ("force" has become the default mode).
        features: As found by the probe.
        facts: As found by the probe.
        counters: The fix's counters; a wrapper bumps them as plain attributes.
        log: Logger in the framework's style. Never used on a hot path.
        shared: A dict that all sites of one application share.
        check_shadows: Takes the class of an object that the framework has just made and reports, once each, whose
            methods in it bypass the wrappers of this application. Costs tens of microseconds: for constructors.
        on_removal: What to undo beyond the sites when the fix is taken off; called last first.
    """

    mode: str
    features: frozenset[str]
    facts: Mapping[str, Any]
    counters: Counters
    log: logging.Logger
    shared: dict[str, Any] = field(default_factory=dict)
    check_shadows: Callable[[type], None] = _nobody_looks
    on_removal: list[Callable[[], None]] = field(default_factory=list)


@record(frozen=True, kw_only=True)
class Fix:
    """One repair of one upstream fault.

    Attributes:
        id: As in "vllm-prefix-stats".
        switch: Environment variable, as in "KVMEND_VLLM_PREFIX_STATS".
        framework: The framework it repairs.
        summary: One line, in the operator's words.
        why: Symptom and trigger.
        how: What the wrappers do and why that is safe.
        remove_when: When an operator can take it off.
        upstream: Links to the upstream issues and pull requests.
        sites: What it may wrap; which of them it does wrap, `Site.wanted` says.
        bodies: What it relies on without touching it.
        probe: Judges source; pure.
        counters: Names of the counters, in the order they are shown, with their meaning.
        may_fall: Those of the counters that are computed and may fall; every other one only rises.
        modes: Switch values beyond "1", "0" and "force"; the first is what "1" and "force" mean.
        fingerprints: "package:file.json" of the table of known sources, or "" if there is none.
        proof: "module" with a function `measure() -> list[Case]`, run in a subprocess by `kvmend verify`; "" if none.
        demo: "module" with a function `run(options) -> int` for `kvmend demo`; "" if none.
        releases: Which releases are affected, for people, as in "0.8.5 – 0.26.0".
        judge_late: Read no source before one of the sites' modules is imported: for modules that most processes, or
            most machines, never import. Until then the fix is `armed`, whatever the source is.
    """

    id: str
    switch: str
    framework: Framework
    summary: str
    why: str
    how: str
    remove_when: str
    upstream: tuple[str, ...]
    sites: tuple[Site, ...]
    probe: Probe
    bodies: tuple[Body, ...] = ()
    counters: Mapping[str, str] = field(default_factory=dict)
    may_fall: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    fingerprints: str = ""
    proof: str = ""
    demo: str = ""
    releases: str = ""
    judge_late: bool = False

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise FixDeclarationError(f"fix id {self.id!r} is not lower-case words joined by '-'")
        if not _SWITCH.fullmatch(self.switch):
            raise FixDeclarationError(f"fix {self.id}: switch {self.switch!r} is not of the form KVMEND_NAME")
        if not self.sites:
            raise FixDeclarationError(f"fix {self.id} names no site")
        for body in (*self.sites, *self.bodies):
            if body.module.partition(".")[0] != self.framework.package:
                raise FixDeclarationError(f"fix {self.id}: {body.key} is not in the package {self.framework.package!r}")
        for name in self.counters:
            if not name.isidentifier():
                raise FixDeclarationError(f"fix {self.id}: counter {name!r} is not an identifier")
        for name in self.may_fall:
            if name not in self.counters:
                raise FixDeclarationError(f"fix {self.id}: {name!r} in may_fall is none of its counters")

    @property
    def read(self) -> tuple[Body, ...]:
        """Every body whose source is judged: sites first, then relied-on bodies."""
        return (*self.sites, *self.bodies)

    @property
    def default_mode(self) -> str:
        """What the switch value "1" means."""
        return self.modes[0] if self.modes else "1"

    def sites_for(self, mode: str, features: frozenset[str]) -> tuple[Site, ...]:
        """The sites that take part for a mode and the features found."""
        return tuple(site for site in self.sites if site.wanted(mode, features))


@record(frozen=True, kw_only=True)
class Case:
    """One row of a proof: what a right framework shows, and what this one shows.

    Attributes:
        name: A sentence of behaviour.
        expected: The right value, JSON-able.
        measured: The value measured, JSON-able.
    """

    name: str
    expected: Any
    measured: Any

    @property
    def right(self) -> bool:
        """Whether the measured value is the right one."""
        return bool(self.expected == self.measured)
