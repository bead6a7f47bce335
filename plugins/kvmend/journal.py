"""What kvmend has done in this process: one entry per fix, under one lock, anew in a forked child."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvmend.counters import Counters
from kvmend.fix import Site
from kvmend.outcome import Result
from kvmend.plan import Plan


@dataclass(frozen=True, slots=True)
class Patch:
    """One site that was wrapped: the holder's attribute, what was there, what is there now."""

    site: Site
    holder: Any
    name: str
    before: Any
    after: Any


@dataclass(slots=True)
class Entry:
    """The state of one fix in this process.

    `shadowed_by` names the functions that bypass its wrappers, `on_removal` is what its context was given to undo.
    """

    plan: Plan
    result: Result
    counters: Counters
    patches: tuple[Patch, ...] = ()
    inherited: bool = False
    committing: bool = False
    doing: list[Patch] = field(default_factory=list)
    shadowed_by: tuple[str, ...] = ()
    on_removal: list[Callable[[], None]] = field(default_factory=list)


@dataclass(slots=True)
class Journal:
    """State of the whole process. `lock` guards everything in it and every attribute that kvmend sets."""

    pid: int = field(default_factory=os.getpid)
    parent: int | None = None
    entries: dict[str, Entry] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)


JOURNAL = Journal()


def _in_forked_child() -> None:
    # The wrappers came along with the memory, so the outcomes hold; the lock may be held by a thread that did not.
    JOURNAL.lock = threading.RLock()
    JOURNAL.parent, JOURNAL.pid = JOURNAL.pid, os.getpid()
    for entry in JOURNAL.entries.values():
        entry.counters.reset()
        if entry.committing:
            # Another thread of the parent was at it and is not here to go on: all sites or none, so none.
            for patch in reversed(entry.doing):
                setattr(patch.holder, patch.name, patch.before)
        entry.inherited, entry.committing = True, False


os.register_at_fork(after_in_child=_in_forked_child)
