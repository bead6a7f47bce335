"""How the application of a fix can end, and the record of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import Enum
from typing import Any

from kvmend.record import record


class Outcome(str, Enum):
    """The nine ways a fix can end in a process."""

    APPLIED = "applied"
    ARMED = "armed"
    DISABLED = "disabled"
    NOT_INSTALLED = "not_installed"
    NOT_AFFECTED = "not_affected"
    ALREADY_FIXED = "already_fixed"
    UNKNOWN_SOURCE = "unknown_source"
    CONFLICT = "conflict"
    FAILED = "failed"

    def __str__(self) -> str:
        return self.value

    @property
    def meaning(self) -> str:
        """One line for people: what it means and what to do."""
        return _MEANING[self]

    @property
    def good(self) -> bool:
        """Whether a wanted fix that ends so does its job, will do it, or is not needed."""
        return self in _GOOD


_GOOD = frozenset({Outcome.APPLIED, Outcome.ARMED, Outcome.ALREADY_FIXED, Outcome.NOT_AFFECTED})

_MEANING = {
    Outcome.APPLIED: "The fix is in place in this process. Nothing to do.",
    Outcome.ARMED: "The framework module is not imported yet; the fix goes in when it is. Nothing to do.",
    Outcome.DISABLED: "Switched off by its own switch or by KVMEND=0.",
    Outcome.NOT_INSTALLED: "The framework is not installed here.",
    Outcome.NOT_AFFECTED: "This release does not have the fault. Nothing to do.",
    Outcome.ALREADY_FIXED: "This release has upstream's own repair; nothing was touched. The fix can be retired.",
    Outcome.UNKNOWN_SOURCE: (
        "The installed source is none that this kvmend knows; nothing was touched. Upgrade kvmend, or set the switch "
        "to force after reading the evidence of kvmend check."
    ),
    Outcome.CONFLICT: (
        "Another plugin is at a function the fix needs, in a way that cannot go together. Load only one of the two."
    ),
    Outcome.FAILED: "The fix is not in place and every site is as it was; the reason says why.",
}


@record(frozen=True, kw_only=True)
class Evidence:
    """What was read of one body.

    Attributes:
        body: `module:qualname`.
        path: File, or None where the body is not there.
        line: 1-based line, or None where the body is not there or was not looked for.
        fingerprint: 16 hex digits, or None.
        known_as: Releases whose body is exactly this one, oldest first.
    """

    body: str
    path: str | None
    line: int | None
    fingerprint: str | None
    known_as: tuple[str, ...] = ()


@record(frozen=True, kw_only=True)
class Result:
    """The outcome of one fix in one process, or the forecast of it.

    Attributes:
        fix: Id of the fix.
        outcome: How it ended.
        reason: One line: why.
        mode: The mode in force, or "" where the fix is off.
        framework: Name of the framework, as in "vLLM".
        version: Version of the distribution that provides it, or None.
        sites: `module:qualname` of what was wrapped.
        evidence: What was read.
        features: As found by the probe.
        facts: As found by the probe.
        known_as: Releases whose source is exactly the installed one.
        shadowed_by: `module.qualname` of methods of others that bypass what was wrapped.
    """

    fix: str
    outcome: Outcome
    reason: str
    mode: str = ""
    framework: str = ""
    version: str | None = None
    sites: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    features: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    known_as: tuple[str, ...] = ()
    shadowed_by: tuple[str, ...] = ()
