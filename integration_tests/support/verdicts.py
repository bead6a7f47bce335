"""The verdict on an installation, from its files alone and from its source."""

from __future__ import annotations

import dataclasses

from kvmend.api import Fix
from kvmend.judge import judge
from kvmend.locate import Installation


def afresh(installation: Installation) -> Installation:
    """The same installation, nothing of it read yet."""
    return dataclasses.replace(installation, _files={}, _texts={}, _troubles={}, _bodies={})


def told_by_files(fix: Fix, installation: Installation) -> bool:
    """Whether the table of known sources has the files; if so, what it says is what reading the source says."""
    unread = afresh(installation)
    quick = judge(fix, unread, by_files=True)
    if any(entry.line is not None for entry in quick.evidence):
        return False
    assert not unread._texts, "something was decoded after all"
    full = judge(fix, afresh(installation))
    without_lines = tuple(dataclasses.replace(entry, line=None) for entry in full.evidence)
    assert quick == dataclasses.replace(full, evidence=without_lines)
    return True
