"""Which process this is, told from every other that may share a folder with it, and whether another still runs.

A pid alone is no name: containers have their own, and the kernel gives them out again. The boot, the pid namespace
and the moment of the process's start make it one.
"""

from __future__ import annotations

import hashlib
import os
import re
import time

from kvmend.record import record

_STARTED_AT = 19  # index of `starttime` in /proc/PID/stat, counted from behind the command's bracket; see proc(5)


@record(frozen=True, kw_only=True)
class Process:
    """One process of one machine or container.

    Attributes:
        host: Name of the host, as the process sees it.
        boot: Id of the kernel's boot; empty where the kernel does not tell.
        namespace: Id of the pid namespace, as in "pid:[4026531836]"; empty where the kernel does not tell.
        pid: Its pid in that namespace.
        birth: When it started, in clock ticks since the boot; 0 where the kernel does not tell.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    birth: int

    @property
    def id(self) -> str:
        """12 hex digits that no other process of any host or restart shares."""
        text = f"{self.boot}|{self.namespace}|{self.birth}|{self.pid}|{self.host}"
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]

    @property
    def file_name(self) -> str:
        """Name of its report, as in `kvmend-gpu7-4711-5f0c2a91b3d4.json`."""
        host = re.sub(r"[^A-Za-z0-9._-]", "_", self.host)[:64] or "host"
        return f"kvmend-{host}-{self.pid}-{self.id}.json"


_own: Process | None = None


def own() -> Process:
    """This process."""
    global _own
    pid = os.getpid()
    if _own is None or _own.pid != pid:
        state_and_birth = _stat("self")
        if state_and_birth is None:  # no /proc: the clock is the best there is
            boot, namespace, birth = "", "", time.time_ns()
        else:
            boot, namespace, birth = _text("/proc/sys/kernel/random/boot_id"), _namespace(), state_and_birth[1]
        _own = Process(host=os.uname().nodename, boot=boot, namespace=namespace, pid=pid, birth=birth)
    return _own


def runs(process: Process) -> bool | None:
    """Whether a process runs; None where that cannot be seen from here: another boot, another pid namespace."""
    here = own()
    if not here.boot or (here.boot, here.namespace) != (process.boot, process.namespace) or not here.namespace:
        return None
    found = _stat(str(process.pid))
    if found is not None:
        state, birth = found
        return birth == process.birth and state not in "ZX"
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return None  # somebody else's, and /proc is mounted so that it does not show
    return None


def _stat(pid: str) -> tuple[str, int] | None:
    """State letter and start of a process, or None if /proc does not show it."""
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    try:
        return fields[0], int(fields[_STARTED_AT])
    except (IndexError, ValueError):
        return None


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read().strip()
    except OSError:
        return ""
