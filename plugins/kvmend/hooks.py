"""Arming: a fix whose modules are not imported yet is committed when they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from kvmend import applier, imports
from kvmend.fix import Site
from kvmend.journal import JOURNAL
from kvmend.outcome import Outcome, Result

Settled = Callable[[Result], None]


def arm(fix_id: str, sites: Sequence[Site], settled: Settled) -> None:
    """Commits the fix after the import of any of its sites' modules, once all of them are there.

    Args:
        fix_id: An armed fix.
        sites: Its sites.
        settled: Called once, with the result, when the fix is no longer armed. May raise to stop the process.
    """
    modules = tuple(dict.fromkeys(site.module for site in sites))
    sys.meta_path.insert(0, _Watch(fix_id, modules, settled))
    # What another thread has imported since the fix was tried has been missed by the finder.
    if any(module in sys.modules for module in modules):
        _try(fix_id, settled, wait=True)


def _try(fix_id: str, settled: Settled, *, wait: bool) -> bool:
    """Whether the fix is no longer armed."""
    lock = JOURNAL.lock
    if not lock.acquire(blocking=wait):
        return False
    try:
        entry = JOURNAL.entries.get(fix_id)
        if entry is None or entry.result.outcome is not Outcome.ARMED:
            return True
        result = applier.commit(fix_id)
    finally:
        lock.release()
    if result.outcome is Outcome.ARMED:
        return False
    settled(result)
    return True


class _Watch:
    """A finder that tries an armed fix when the import of a module has ended, and at the next import of anything.

    A module that was half imported when the plugin was loaded, by this thread or another, ends its import unseen by
    any hook, and the next import is the earliest moment to notice. Two things the finder must not do: wait for the
    journal, because whoever holds it may wait for the import that is going on here; and leave the list that the import
    system is walking through, because the finder after it would be skipped. So it stays, and does nothing once done.
    """

    def __init__(self, fix_id: str, modules: tuple[str, ...], settled: Settled) -> None:
        self._fix_id = fix_id
        self._modules = modules
        self._settled = settled
        self._done = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if self._done:
            return None
        if name in self._modules:
            return imports.found(self, name, path, target, self._imported)
        if all(module in sys.modules for module in self._modules):
            self._done = _try(self._fix_id, self._settled, wait=False)
        return None

    def _imported(self, _module: ModuleType) -> None:
        self._done = self._done or _try(self._fix_id, self._settled, wait=True)
