"""Arming: a fix whose modules are not imported yet is committed when they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import wrapt

from kvmend import applier
from kvmend.fix import Site
from kvmend.journal import JOURNAL
from kvmend.outcome import Outcome, Result
from kvmend.seams import still_running

Settled = Callable[[Result], None]


def arm(fix_id: str, sites: Sequence[Site], settled: Settled) -> None:
    """Commits the fix after the import of any of its sites' modules, once all of them are there.

    Args:
        fix_id: An armed fix.
        sites: Its sites.
        settled: Called once, with the result, when the fix is no longer armed. May raise to stop the process.
    """

    def imported(_module: ModuleType) -> None:
        _try(fix_id, settled)

    for module in dict.fromkeys(site.module for site in sites):
        wrapt.register_post_import_hook(imported, module)
    if any(still_running(site) for site in sites):
        _Retry.install(fix_id, settled)


def _try(fix_id: str, settled: Settled) -> bool:
    """Whether the fix is no longer armed."""
    with JOURNAL.lock:
        entry = JOURNAL.entries.get(fix_id)
        if entry is None:
            return True
        if entry.result.outcome is not Outcome.ARMED:
            return True
        result = applier.commit(fix_id)
    if result.outcome is Outcome.ARMED:
        return False
    settled(result)
    return True


class _Retry:
    """Finds nothing; tries an armed fix again at the next imports.

    A module that was half imported when the plugin was loaded ends its import unseen by any hook. The next import
    of anything is the earliest moment to notice, and the finder takes itself away then.
    """

    def __init__(self, fix_id: str, settled: Settled) -> None:
        self._fix_id = fix_id
        self._settled = settled

    @classmethod
    def install(cls, fix_id: str, settled: Settled) -> None:
        sys.meta_path.insert(0, cls(fix_id, settled))

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if self in sys.meta_path and _try(self._fix_id, self._settled):
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        return None
