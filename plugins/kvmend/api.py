"""Everything that a fix may import from kvmend."""

from __future__ import annotations

from kvmend.counters import Counters
from kvmend.fix import (
    AFFECTED,
    FIXED,
    NOT_AFFECTED,
    UNKNOWN,
    Body,
    BodySource,
    Case,
    Context,
    Finding,
    Fix,
    Framework,
    Probe,
    Role,
    Site,
    Sources,
    Wrap,
)
from kvmend.pluginlist import left_out
from kvmend.record import record
from kvmend.seams import reached
from kvmend.settings import strict

__all__ = [
    "AFFECTED",
    "FIXED",
    "NOT_AFFECTED",
    "UNKNOWN",
    "Body",
    "BodySource",
    "Case",
    "Context",
    "Counters",
    "Finding",
    "Fix",
    "Framework",
    "Probe",
    "Role",
    "Site",
    "Sources",
    "Wrap",
    "left_out",
    "reached",
    "record",
    "strict",
]
