"""Measures the FastDeploy that this process imports: without kvmend, with it, without again, with PR 7420's condition.

Usage: python xpumeasure.py ANSWER.json
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

from kvmend import applier
from kvmend.journal import JOURNAL
from kvmend_fixes.fastdeploy._launch_rule import TO_ATTACH, TO_CREATE
from kvmend_fixes.fastdeploy._xpu_steer import led
from kvmend_fixes.fastdeploy.xpu_kv_cache import FIX
from kvmend_fixes.proofs._xpu_rig import Rig, Setup, Started
from kvmend_fixes.proofs.fastdeploy_xpu_kv_cache import table, without_prefix_caching

#: What a runner or worker would have if weights could be reloaded on XPU.
RELOADS = ("update_parameters", "clear_parameters", "update_weights", "clear_requests", "sleep", "wakeup")


def row(setup: Setup, started: Started) -> dict[str, Any]:
    """One row of a table, JSON-able."""
    return {
        "name": setup.name,
        "role": setup.role,
        "counts": sorted(started.creator_counts) if not started.waiting else [0],
        "creators": sorted({process for processes in started.creators.values() for process in processes}),
        "tensors": len(started.creators),
        "bytes": started.bytes,
        "waiting": list(started.waiting),
        "caches": started.caches,
        "signals": started.signals,
    }


def rows(rig: Rig, setups: list[Setup], restarts: int = 0) -> list[dict[str, Any]]:
    """The rows of a table."""
    return [row(setup, rig.start(setup, restarts=restarts)) for setup in setups]


def tables(rig: Rig) -> dict[str, Any]:
    """All tables of one state of this process."""
    ranks = [dataclasses.replace(setup, ranks=2) for setup in table()]
    group = [dataclasses.replace(setup, group=1) for setup in ranks]
    return {
        "table": rows(rig, table()),
        "bare": rows(rig, without_prefix_caching()),
        "mtp": rows(rig, table(mtp=True)) if rig.has_mtp else [],
        "mtp_bare": rows(rig, without_prefix_caching(mtp=True)) if rig.has_mtp else [],
        "ranks": rows(rig, ranks),
        "group": rows(rig, group),
        "again": rows(rig, table(), restarts=1),
        "profile": [row(setup, rig.profile(setup)) for setup in table() + (table(mtp=True) if rig.has_mtp else [])],
    }


def follow_7420(rig: Rig) -> None:
    """Puts the condition of PR 7420 in the place of the runner's own, by our own lead."""
    kind = rig.worker.XPUModelRunner
    original = kind.initialize_kv_cache

    @functools.wraps(original)
    def initialize_kv_cache(runner: Any, profile: bool = False) -> Any:
        caching = runner.fd_config.cache_config
        moved = caching.num_cpu_blocks > 0 or bool(caching.kvcache_storage_backend)
        attaches = moved or runner.fd_config.scheduler_config.splitwise_role != "mixed"
        return original(led(runner, TO_ATTACH if attaches and not profile else TO_CREATE), profile=profile)

    kind.initialize_kv_cache = initialize_kv_cache


def main(answer: Path) -> None:
    rig = Rig()
    fix = dataclasses.replace(FIX, fingerprints="") if os.environ["KVMEND_TEST_PROBE_ONLY"] == "1" else FIX
    data: dict[str, Any] = {"mtp": rig.has_mtp, "plain": tables(rig)}
    result = applier.apply(fix)
    data |= {"outcome": str(result.outcome), "reason": result.reason, "facts": dict(result.facts)}
    data["features"] = list(result.features)
    data["mended"] = tables(rig)
    data["counters"] = JOURNAL.entries[fix.id].counters.as_dict()
    if result.outcome.value == "applied":
        applier.remove(fix.id)
    data["removed"] = {"table": rows(rig, table()), "bare": rows(rig, without_prefix_caching())}
    follow_7420(rig)
    data["literal"] = {"table": rows(rig, table()), "bare": rows(rig, without_prefix_caching())}
    worker = sys.modules.get("fastdeploy.worker.xpu_worker")
    data["reloads"] = [name for name in RELOADS for kind in (rig.worker.XPUModelRunner, worker) if hasattr(kind, name)]
    data["unset_data_ipc"] = getattr(rig.transfer, "unset_data_ipc", None) is not None
    answer.write_text(json.dumps(data), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
