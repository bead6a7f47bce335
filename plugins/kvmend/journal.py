"""What kvmend has done in this process: one entry per fix, under one lock, anew in a forked child."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from kvmend.counters import Counters
from kvmend.fix import Site
from kvmend.outcome import Result
from kvmend.plan import Plan
from kvmend.record import record


@record(frozen=True, kw_only=True)
class Patch:
    """One site that was wrapped: the holder's attribute, what was there, what is there now."""

    site: Site
    holder: Any
    name: str
    before: Any
    after: Any


class Entry:
    """The state of one fix in this process.

    `shadowed_by` names the functions that bypass its wrappers, `on_removal` is what its context was given to undo.
    """

    def __init__(self, *, plan: Plan, result: Result, counters: Counters) -> None:
        self.plan = plan
        self.result = result
        self.counters = counters
        self.patches: tuple[Patch, ...] = ()
        self.inherited = self.committing = False
        self.doing: list[Patch] = []
        self.shadowed_by: tuple[str, ...] = ()
        self.on_removal: list[Callable[[], None]] = []


class Journal:
    """State of the whole process. `lock` guards everything in it and every attribute that kvmend sets."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.parent: int | None = None
        self.entries: dict[str, Entry] = {}
        self.lock = threading.RLock()


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
