"""Reads the reports of a folder: whose they are, who of them lives, and what cannot be read."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
import time
from dataclasses import dataclass
from typing import Any

from kvmend.errors import UsageError
from kvmend.outcome import Outcome
from kvmend.process import Process, runs
from kvmend.report import SCHEMA

RUNNING, SILENT, ENDED, DEAD = "running", "silent", "ended", "dead"
STATES = (RUNNING, SILENT, ENDED, DEAD)
#: Heartbeats that may be missed: an engine that compiles or loads weights can keep its threads from running.
PATIENCE = 4
#: No report is longer, in bytes.
_LONGEST = 1 << 20
_OUTCOMES = {str(outcome): outcome for outcome in Outcome}


class _Unreadable(Exception):
    """A file is no report; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One process, as its report has it.

    Attributes:
        file: Name of the report in the folder.
        data: The report.
        state: "running", "silent" (there, or at least not known to be gone, but its report is overdue), "ended" in
            order, or "dead" (gone without a last word).
        age: Seconds since the report was written.
        inode: Of the file that was read.
    """

    file: str
    data: dict[str, Any]
    state: str
    age: float
    inode: int

    @property
    def lives(self) -> bool:
        """Whether the process counts: it is not known to be gone."""
        return self.state in (RUNNING, SILENT)

    @property
    def ok(self) -> bool:
        """Whether it has said lately that each of its wanted fixes does its job; a gone process cannot be wrong."""
        fixes = self.data["fixes"]
        return not self.lives or (self.state == RUNNING and bool(fixes) and all(map(fix_ok, fixes)))

    def framework(self) -> tuple[str, str | None]:
        """Name and version of the framework; the version is None where no fix knows it."""
        named = [(fix["framework"], fix["version"]) for fix in self.data["fixes"] if fix["framework"]]
        return next((each for each in named if each[1]), named[0] if named else ("", None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder of reports at one moment.

    Attributes:
        path: The folder.
        read: When, in seconds since the epoch.
        processes: Those that live first, then by host and start.
        unreadable: Name and reason of every JSON file that is no report.
        pruned: Names of the files that were removed.
    """

    path: str
    read: float
    processes: tuple[Seen, ...]
    unreadable: tuple[tuple[str, str], ...]
    pruned: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether some process lives, all that live are well, and no report is left that cannot be read."""
        living = [seen for seen in self.processes if seen.lives]
        return bool(living) and all(seen.ok for seen in living) and not any(map(_named_like_ours, self.unreadable))

    def count(self, state: str) -> int:
        """How many processes are in a state."""
        return sum(seen.state == state for seen in self.processes)


def fix_ok(fix: dict[str, Any]) -> bool:
    """Whether a fix of a report is not wanted, or does its job, will do it, or is not needed."""
    outcome = _OUTCOMES[fix["outcome"]]
    return outcome is Outcome.DISABLED or (outcome.good and not fix["shadowed_by"])


def gather(path: str, now: float | None = None) -> Folder:
    """Reads every report of a folder.

    Raises:
        UsageError: The folder cannot be read.
    """
    now = time.time() if now is None else now
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    found: dict[str, Seen] = {}
    unreadable = []
    for name in names:
        if not name.endswith(".json") or name.startswith("."):
            continue
        try:
            data, inode = _read(os.path.join(path, name))
        except FileNotFoundError:  # removed since
            continue
        except _Unreadable as error:
            unreadable.append((name, str(error)))
            continue
        seen = _seen(name, data, inode, now)
        other = found.get(data["process"])
        if other is not None:
            older, seen = sorted((other, seen), key=lambda each: -each.age)
            unreadable.append((older.file, f"the same process as {seen.file}"))
        found[data["process"]] = seen
    order = sorted(found.values(), key=lambda each: (not each.lives, each.data["host"], each.data["started"]))
    return Folder(path=path, read=now, processes=tuple(order), unreadable=tuple(unreadable))


def prune(folder: Folder) -> Folder:
    """Removes the reports of processes that are gone, and what a process left that died while it wrote.

    Raises:
        UsageError: A file cannot be removed.
    """
    pruned = []
    try:
        for seen in folder.processes:
            file = os.path.join(folder.path, seen.file)
            # A process that was taken for dead may have written again; then it is another file.
            if not seen.lives and _inode(file) == seen.inode:
                os.unlink(file)
                pruned.append(seen.file)
        for name in sorted(os.listdir(folder.path)):
            file = os.path.join(folder.path, name)
            if name.startswith(".kvmend-") and name.endswith(".tmp") and folder.read - os.lstat(file).st_mtime > 60:
                os.unlink(file)
                pruned.append(name)
    except FileNotFoundError:  # somebody else prunes too
        pass
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be removed: {error.strerror or error}") from error
    left = tuple(seen for seen in folder.processes if seen.file not in pruned)
    return dataclasses.replace(folder, processes=left, pruned=tuple(pruned))


def _seen(file: str, data: dict[str, Any], inode: int, now: float) -> Seen:
    age = max(0.0, now - data["written"])
    fresh = age <= PATIENCE * data["heartbeat"]
    running = runs(
        Process(
            host=data["host"],
            boot=data["boot"],
            namespace=data["pid_namespace"],
            pid=data["pid"],
            birth=data["birth"],
        )
    )
    if data["ended"] is not None:
        state = ENDED
    elif running is None:
        state = RUNNING if fresh else DEAD
    elif running:
        state = RUNNING if fresh else SILENT
    else:
        state = DEAD
    return Seen(file=file, data=data, state=state, age=age, inode=inode)


def _inode(file: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(file).st_ino
    return None


def _named_like_ours(entry: tuple[str, str]) -> bool:
    return entry[0].startswith("kvmend-") and not entry[1].startswith("the same process")


def _read(file: str) -> tuple[dict[str, Any], int]:
    """A report and its inode; unreadable if it is none."""
    try:
        # Not blocking: somebody's pipe in the folder must not hold the command up.
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as stream:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise _Unreadable("not a file")
            raw = stream.read(_LONGEST + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _Unreadable(error.strerror or str(error)) from error
    if len(raw) > _LONGEST:
        raise _Unreadable(f"longer than {_LONGEST} bytes")
    try:
        data = json.loads(raw.decode("utf-8"), parse_constant=_no_number)
    except RecursionError as error:
        raise _Unreadable("nested too deeply") from error
    except ValueError as error:
        raise _Unreadable(f"not JSON: {error}" if raw else "empty") from error
    return _valid(data), found.st_ino


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


_NUMBER, _TEXT = (int, float), (str,)
_FIELDS: dict[str, tuple[type, ...]] = {
    "kvmend": _TEXT, "process": _TEXT, "host": _TEXT, "boot": _TEXT, "pid_namespace": _TEXT, "pid": (int,),
    "birth": (int,), "forked_from": (int, type(None)), "role": (dict,), "command": (list,), "started": _NUMBER,
    "written": _NUMBER, "ended": (*_NUMBER, type(None)), "heartbeat": _NUMBER, "fixes": (list,),
}  # fmt: skip
_ROLE: dict[str, tuple[type, ...]] = {"name": _TEXT, "rank": (int, type(None)), "node": _TEXT}
_FIX: dict[str, tuple[type, ...]] = {
    "fix": _TEXT, "outcome": _TEXT, "reason": _TEXT, "mode": _TEXT, "framework": _TEXT, "version": (str, type(None)),
    "shadowed_by": (list,), "inherited": (bool,), "counters": (dict,), "derived": (list,),
}  # fmt: skip


def _valid(data: Any) -> dict[str, Any]:
    """What `kvmend status` needs of `report.schema.json`, without a library for schemas beside the server."""
    schema = data.get("schema") if isinstance(data, dict) else None
    if type(schema) is not int or "fixes" not in data:
        raise _Unreadable("no report of kvmend")
    if schema != SCHEMA:
        raise _Unreadable(f"schema {schema}, this kvmend reads {SCHEMA}; use the newer kvmend")
    _check(data, _FIELDS, "")
    _check(data["role"], _ROLE, "role.")
    for index, fix in enumerate(data["fixes"]):
        where = f"fixes[{index}]."
        if not isinstance(fix, dict):
            raise _Unreadable(f"{where[:-1]} is no object")
        _check(fix, _FIX, where)
        if fix["outcome"] not in _OUTCOMES:
            raise _Unreadable(f"{where}outcome {fix['outcome']!r} is none of {', '.join(_OUTCOMES)}")
        if not all(type(value) is int for value in fix["counters"].values()):
            raise _Unreadable(f"{where}counters has a value that is no integer")
        if not all(isinstance(name, str) for name in (*fix["shadowed_by"], *fix["derived"])):
            raise _Unreadable(f"{where[:-1]} has a name that is no text")
    return dict(data)


def _check(data: dict[str, Any], fields: dict[str, tuple[type, ...]], where: str) -> None:
    for name, types in fields.items():
        if name not in data:
            raise _Unreadable(f"{where}{name} is missing")
        if type(data[name]) not in types:
            raise _Unreadable(f"{where}{name} is {data[name]!r:.40}")
