"""Keeps this process's report fresh: one daemon thread, and only where KVMEND_STATE_DIR asks for reports.

The thread does all the writing, so that no import and no scheduling step ever waits for a disk. It looks at the
counters and at the objects in place every few seconds, and writes when something moved, or as a sign of life.
A forked child inherits the fixes and logs nothing, because nothing was done in it; it reports once it has something of
its own to report, or has lived for a while, so that short-lived helpers of the framework leave no file behind.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from typing import Any

from kvmend import applier, report, settings, voice
from kvmend.errors import SettingsError
from kvmend.journal import JOURNAL
from kvmend.outcome import Outcome, Result
from kvmend.voice import log, warn_once

#: Seconds between two looks at the counters and at the objects in place.
INTERVAL = 5.0
#: Seconds between two reports at least; the last word of a process does not wait for it.
SPACING = 1.0
#: Seconds that the end of a process waits for its last report.
PATIENCE = 5.0

_Seen = list[tuple[Result, dict[str, int]]]


class _Freshener:
    """The thread of one process and what it has seen.

    Attributes:
        seen: What the last report said; None if none was written yet.
        written: Whether this process has a report on disk, or tried.
    """

    def __init__(self, seen: _Seen | None) -> None:
        self.pid = os.getpid()
        self.seen = seen
        self.written = False
        self._last = time.monotonic() if seen is not None else float("-inf")
        self._hurry, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvmend-report", daemon=True)
        self._thread.start()

    def hurry(self) -> None:
        """Something has just changed."""
        self._hurry.set()

    def finish(self) -> None:
        """Writes the last report, unless there is nothing to say; waits for a slow disk, but not for ever."""
        self._end.set()
        self._hurry.set()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        ended = False
        while not ended:
            self._hurry.wait(0 if self.seen is None else INTERVAL)
            self._end.wait(max(0.0, self._last + SPACING - time.monotonic()))
            self._hurry.clear()
            ended = self._end.is_set()
            try:
                self._look(ended)
            except Exception as error:  # the next look may be luckier
                log(logging.DEBUG, "kvmend: the report could not be made", error=error)
                self.seen = self.seen or []

    def _look(self, ended: bool) -> None:
        seen = look()
        for result, _ in seen:
            _tell(result)
        moved = seen != self.seen
        if moved or (ended and self.written) or (not ended and self._due()):
            self.seen, self.written, self._last = seen, True, time.monotonic()
            report.write(ended=ended)

    def _due(self) -> bool:
        """Whether waiting for the next look could make the report older than it promises to become."""
        return time.monotonic() - self._last >= report.HEARTBEAT - INTERVAL


def look() -> _Seen:
    """What the objects in place and the counters say now."""
    with JOURNAL.lock:
        return [(result, JOURNAL.entries[result.fix].counters.as_dict()) for result in applier.results()]


def _tell(now: Result) -> None:
    """Logs that another plugin has taken a fix's place since it was last spoken of, or has given it back."""
    places = {Outcome.APPLIED, Outcome.CONFLICT}
    if now.outcome in places and voice.said.get(now.fix) in places - {now.outcome}:
        voice.say(JOURNAL.entries[now.fix].plan.fix, now)


_freshener: _Freshener | None = None
_hooked = False


def publish() -> None:
    """Has this process's report written if KVMEND_STATE_DIR is set, and kept fresh from now on. Never raises."""
    global _freshener, _hooked
    try:
        settings.pin_state_dir()
        if settings.state_dir() is None:
            return
        if _freshener is not None and _freshener.pid == os.getpid():
            _freshener.hurry()
            return
        _freshener = _Freshener(None)
        if not _hooked:
            _hooked = True
            atexit.register(finish)
            os.register_at_fork(after_in_child=_in_forked_child)
            _end_with_multiprocessing()
    except SettingsError as error:
        warn_once(f"kvmend: no reports: {error}")
    except Exception as error:  # no thread to be had
        warn_once(f"kvmend: no reports: {error}")


def finish() -> None:
    """Writes the last report of this process, once."""
    global _freshener
    mine, _freshener = _freshener, None
    if mine is not None and mine.pid == os.getpid():
        mine.finish()


def _in_forked_child() -> None:
    global _freshener
    if _freshener is None:  # the parent was at its end
        return
    _freshener = None
    with contextlib.suppress(Exception):
        _freshener = _Freshener(look())
    multiprocessing: Any = sys.modules.get("multiprocessing.util")
    if multiprocessing is not None:
        # A child that `multiprocessing` forks ends without `atexit`, and forgets what was registered before.
        multiprocessing.register_after_fork(_freshener, _register_end)


def _end_with_multiprocessing() -> None:
    """The same for a process that was such a child before kvmend was loaded."""
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        _register_end(None)


def _register_end(_object: Any) -> None:
    multiprocessing: Any = sys.modules.get("multiprocessing.util")
    if multiprocessing is not None:
        multiprocessing.Finalize(None, finish, exitpriority=-100)
