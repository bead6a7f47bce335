"""Reports of processes: reading them, waiting for them, and making them up."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema

import kvmend
from kvmend.process import Process, own


def schema(name: str) -> Any:
    """A schema of the package, by the file's first word."""
    return json.loads((Path(kvmend.__file__).parent / f"{name}.schema.json").read_text(encoding="utf-8"))


REPORT_SCHEMA = schema("report")


def reports(folder: Path) -> dict[int, Any]:
    """Pid to report, each of them valid."""
    found = {}
    for file in folder.glob("kvmend-*.json"):
        data = json.loads(file.read_text(encoding="utf-8"))
        jsonschema.validate(data, REPORT_SCHEMA)
        assert file.name.endswith(f"-{data['pid']}-{data['process']}.json")
        found[data["pid"]] = data
    return found


def until(holds: Callable[[], Any], seconds: float = 30) -> Any:
    """Waits until something holds; gives what it gave, or fails when the time is over."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)
    return found


def one_fix(outcome: str = "applied", **changes: Any) -> dict[str, Any]:
    """A fix of a made-up report."""
    return {
        "fix": "toy-count", "outcome": outcome, "reason": "the lookup counts", "mode": "1", "framework": "ToyFW",
        "version": "1.0", "sites": ["toyfw.engine:Engine.lookup"], "known_as": [], "shadowed_by": [],
        "inherited": False, "counters": {"calls": 3}, "derived": [],
    } | changes  # fmt: skip


def write_report(folder: Path, *fixes: dict[str, Any], process: Process | None = None, **changes: Any) -> Path:
    """Writes a made-up report, of this very process unless another is given; one applied fix if none is given."""
    process, now = process or own(), time.time()
    data = {
        "schema": 1, "kvmend": "0.1.0", "process": process.id, "host": process.host, "boot": process.boot,
        "pid_namespace": process.namespace, "pid": process.pid, "birth": process.birth, "parent_pid": 1,
        "forked_from": None, "role": {"name": "EngineCore", "rank": None, "node": ""}, "command": ["server"],
        "started": now - 10, "written": now, "ended": None, "heartbeat": 15.0, "fixes": list(fixes or [one_fix()]),
    } | changes  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / process.file_name
    file.write_text(json.dumps(data), encoding="utf-8")
    return file
