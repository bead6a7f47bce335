"""The report of this process: what kvmend did here, as JSON, complete on disk or not there at all.

Who writes it and when, `freshener` says. A folder that cannot be written never hurts the server.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from kvmend import __version__, applier, process, settings
from kvmend.errors import SettingsError
from kvmend.fix import Role
from kvmend.journal import JOURNAL
from kvmend.voice import warn_once

SCHEMA = 1
#: Seconds after which a report is written anew although nothing in it has changed.
HEARTBEAT = 15.0
#: Words of the command line that are reported.
_WORDS = 8
_SECRETS = ("key", "token", "password", "secret")

_started = time.time()
_writing = threading.Lock()


def snapshot(*, ended: bool = False) -> dict[str, Any]:
    """The report of this process, as it is written to disk. Its schema is `report.schema.json` beside this file.

    Args:
        ended: Whether this is the process's last word.
    """
    own = process.own()
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
                "derived": list(JOURNAL.entries[result.fix].plan.fix.may_fall),
            }
            for result in applier.results()
        ]
        role = _role()
        now = time.time()
        return {
            "schema": SCHEMA,
            "kvmend": __version__,
            "process": own.id,
            "host": own.host,
            "boot": own.boot,
            "pid_namespace": own.namespace,
            "pid": own.pid,
            "birth": own.birth,
            "parent_pid": os.getppid(),
            "forked_from": JOURNAL.parent,
            "role": {"name": role.name, "rank": role.rank, "node": role.node},
            "command": _public(sys.argv[:_WORDS]),
            "started": _started,
            "written": now,
            "ended": now if ended else None,
            "heartbeat": HEARTBEAT,
            "fixes": fixes,
        }


def write(*, ended: bool = False) -> str | None:
    """Writes the report, complete or not at all.

    Args:
        ended: Whether this is the process's last word.

    Returns:
        The path, or None if there is no folder for it or it cannot be written.
    """
    try:
        folder = settings.state_dir()
    except SettingsError as error:
        warn_once(f"kvmend: no reports: {error}")
        return None
    if folder is None:
        return None
    with _writing:
        try:
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, process.own().file_name)
            replace(path, (json.dumps(snapshot(ended=ended), indent=1) + "\n").encode())
            return path
        except OSError as error:
            # Not the whole error: it may name the temporary file.
            warn_once(f"kvmend: report not written to {folder}: {error.strerror or error}")
            return None


def replace(path: str, content: bytes) -> None:
    """Puts a file in place in one step: readers see the old content or the new one, whatever happens meanwhile.

    Raises:
        OSError: It cannot be written; what was there before still is, and nothing else.
    """
    # Not `tempfile`: its files are for their owner's eyes only, and those who read these are often other users.
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}.tmp")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(handle, view) :]
        finally:
            os.close(handle)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _role() -> Role:
    """What this process is to the first of its frameworks that knows."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    name = multiprocessing.current_process().name if multiprocessing else "MainProcess"
    for entry in JOURNAL.entries.values():
        ask = entry.plan.fix.framework.role
        if ask is not None:
            with contextlib.suppress(Exception):
                return ask(tuple(sys.argv), os.environ, name)
    return Role(name="")


def _public(words: Sequence[str]) -> list[str]:
    """A command line without the values of options that are secrets by their name."""
    shown, hide = [], False
    for word in words:
        option, equals, _ = word.partition("=")
        secret = option.startswith("-") and option.lower().endswith(_SECRETS)
        shown.append("***" if hide else f"{option}=***" if secret and equals else word)
        hide = secret and not equals
    return shown


def _in_forked_child() -> None:
    global _started, _writing
    _started, _writing = time.time(), threading.Lock()


os.register_at_fork(after_in_child=_in_forked_child)
