"""Whether this machine, or the container that this is, has a core and memory for two processes at once."""

from __future__ import annotations

import os
import re
from pathlib import Path

#: Limit and use of memory, in bytes, as a container sees its own: cgroup 2, cgroup 1.
_CGROUPS = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def room_for_two(memory: int, root: Path = Path("/")) -> bool:
    """Whether two processes get a core and their memory each; not if nobody can say.

    Args:
        memory: Bytes that each may need.
        root: Where the system's `proc` and `sys` are.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores > 1 and available_memory(root) >= 2 * memory


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be had without another process losing any; 0 if nobody can say.

    Args:
        root: Where the system's `proc` and `sys` are.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    available = int(found[1]) << 10 if found else 0
    for limit, used in ((_text(root / limit), _text(root / used)) for limit, used in _CGROUPS):
        if limit.isdecimal() and used.isdecimal():  # no limit is "max"
            available = min(available, max(0, int(limit) - int(used)))
    return available


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
