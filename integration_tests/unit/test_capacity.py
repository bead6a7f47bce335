"""Room for two processes: what the system and the container say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvmend.cli.capacity import available_memory, room_for_two

_HAS_8_GIB = {"proc/meminfo": "MemTotal: 9437184 kB\nMemAvailable:    8388608 kB\nBuffers: 1 kB\n"}
_V2, _V1 = "sys/fs/cgroup/memory.", "sys/fs/cgroup/memory/memory."
GIB = 1 << 30


@pytest.mark.parametrize(
    ("files", "available"),
    [
        (_HAS_8_GIB, 8 * GIB),
        (_HAS_8_GIB | {f"{_V2}max": "max\n", f"{_V2}current": f"{5 * GIB}\n"}, 8 * GIB),
        (_HAS_8_GIB | {f"{_V2}max": f"{6 * GIB}\n", f"{_V2}current": f"{5 * GIB}\n"}, GIB),
        (_HAS_8_GIB | {f"{_V2}max": f"{6 * GIB}\n", f"{_V2}current": f"{7 * GIB}\n"}, 0),
        (_HAS_8_GIB | {f"{_V1}limit_in_bytes": str(3 * GIB), f"{_V1}usage_in_bytes": str(GIB)}, 2 * GIB),
        (_HAS_8_GIB | {f"{_V1}limit_in_bytes": "9223372036854771712", f"{_V1}usage_in_bytes": str(GIB)}, 8 * GIB),
        ({"proc/meminfo": "MemFree: 8388608 kB\n"}, 0),
        ({}, 0),
    ],
)
def test_the_least_that_anybody_allows_is_what_there_is(tmp_path: Path, files: dict[str, str], available: int) -> None:
    """Catches a container whose limit nobody looked at: the system would end a server in it."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    assert available_memory(tmp_path) == available


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not say which cores one may use")
@pytest.mark.parametrize(
    ("cores", "memory", "room"), [({0, 3}, 4 * GIB, True), ({0, 3}, 4 * GIB + 1, False), ({0}, GIB, False)]
)
def test_room_for_two_is_two_cores_and_twice_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: set[int], memory: int, room: bool
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text(_HAS_8_GIB["proc/meminfo"], encoding="ascii")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: cores)
    assert room_for_two(memory, tmp_path) is room
