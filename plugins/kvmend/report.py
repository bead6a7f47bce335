"""What kvmend tells of itself: one log line per process and fix, one JSON report per process.

Nothing here runs on a hot path: reports are written when an outcome changes, at exit, and by a daemon thread
that looks at the counters every few seconds. A folder that cannot be written never hurts the server.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import tempfile
import threading
import time
from typing import Any

from kvmend import __version__, applier, settings
from kvmend.fix import Fix
from kvmend.journal import JOURNAL
from kvmend.outcome import Outcome, Result
from kvmend.registry import BrokenFix

SCHEMA = 1
#: Seconds between two looks at the counters.
INTERVAL = 5.0

_QUIET = frozenset({Outcome.APPLIED, Outcome.ALREADY_FIXED, Outcome.NOT_AFFECTED, Outcome.DISABLED})
_started = time.time()


def say(fix: Fix, result: Result) -> None:
    """Logs the end of one fix in the framework's own style; a fix that is only armed has not ended yet."""
    logger = fix.framework.log()
    level = logging.INFO if result.outcome in _QUIET else logging.WARNING
    if result.outcome is Outcome.ARMED or result.outcome is Outcome.NOT_INSTALLED:
        level = logging.DEBUG
    elif result.outcome is Outcome.APPLIED and "FORCED" in result.reason:
        level = logging.WARNING
    logger.log(level, "kvmend: %s", line(result))


def say_broken(entry: BrokenFix) -> None:
    """Logs that somebody's fix could not be loaded."""
    warn_once(f"kvmend: fix {entry.name} of {entry.distribution} could not be loaded: {entry.reason}")


def line(result: Result) -> str:
    """One line for a result, as in `vllm-prefix-stats applied [vLLM 0.26.0]: source is that of 0.26.0; …`."""
    where = f" [{' '.join(filter(None, (result.framework, result.version)))}]" if result.framework else ""
    return f"{result.fix} {result.outcome}{where}: {result.reason}"


def snapshot() -> dict[str, Any]:
    """The report of this process, as it is written to disk. Its schema is `report.schema.json` beside this file."""
    with JOURNAL.lock:
        fixes = [
            {
                "fix": result.fix,
                "outcome": str(result.outcome),
                "reason": result.reason,
                "mode": result.mode,
                "framework": result.framework,
                "version": result.version,
                "sites": list(result.sites),
                "known_as": list(result.known_as),
                "shadowed_by": list(result.shadowed_by),
                "inherited": JOURNAL.entries[result.fix].inherited,
                "counters": JOURNAL.entries[result.fix].counters.as_dict(),
            }
            for result in applier.results()
        ]
        return {
            "schema": SCHEMA,
            "kvmend": __version__,
            "pid": JOURNAL.pid,
            "parent_pid": os.getppid(),
            "forked_from": JOURNAL.parent,
            "command": sys.argv[:8],
            "started": _started,
            "written": time.time(),
            "fixes": fixes,
        }


def publish() -> None:
    """Writes this process's report if KVMEND_STATE_DIR is set, and keeps it fresh from now on."""
    if settings.state_dir() is None:
        return
    write()
    _Freshener.start()


def write() -> str | None:
    """Writes the report: complete or not at all, one file per process.

    Returns:
        The path, or None if there is no folder for it or it cannot be written.
    """
    folder = settings.state_dir()
    if folder is None:
        return None
    data = snapshot()
    path = os.path.join(folder, f"kvmend-{data['pid']}.json")
    temporary = None
    try:
        os.makedirs(folder, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".kvmend-{data['pid']}-", dir=folder)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(data, stream, indent=1)
            stream.write("\n")
        os.replace(temporary, path)
        return path
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        # Not the whole error: it names the temporary file, which is another one each time.
        warn_once(f"kvmend: report not written to {folder}: {error.strerror or error}")
        return None


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Logs a warning, the same text once per process."""
    if message not in _warned:
        _warned.add(message)
        logging.getLogger("kvmend").warning(message)


class _Freshener:
    """Rewrites the report when the counters have moved or a shadow was found.

    One daemon thread per process, started on first use.
    """

    _thread: threading.Thread | None = None
    _pid = 0
    _registered = False

    @classmethod
    def start(cls) -> None:
        if cls._pid == os.getpid() and cls._thread is not None:
            return
        cls._pid = os.getpid()
        cls._thread = threading.Thread(target=cls._run, name="kvmend-report", daemon=True)
        cls._thread.start()
        if not cls._registered:
            cls._registered = True
            atexit.register(write)
            os.register_at_fork(after_in_child=publish)

    @staticmethod
    def _counts() -> list[tuple[dict[str, int], tuple[str, ...]]]:
        with JOURNAL.lock:
            return [(entry.counters.as_dict(), entry.shadowed_by) for entry in JOURNAL.entries.values()]

    @classmethod
    def _run(cls) -> None:
        before = cls._counts()
        while True:
            time.sleep(INTERVAL)
            counts = cls._counts()
            if counts != before:
                before = counts
                write()
