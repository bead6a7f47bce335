"""The process that `kvmend verify` starts: applies the fix as the environment says, runs its proof, writes JSON."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from kvmend import loading
from kvmend.applier import results
from kvmend.cli.catalogue import fix_named


def measure(fix_id: str) -> dict[str, Any]:
    """Outcome of the fix in this process and the cases of its proof."""
    fix = fix_named(fix_id)
    loading.apply_all(fix.framework.package)
    cases = importlib.import_module(fix.proof).measure()
    result = next(each for each in results() if each.fix == fix.id)
    return {
        "outcome": str(result.outcome),
        "reason": result.reason,
        "cases": [dataclasses.asdict(case) for case in cases],
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(measure(sys.argv[1])), encoding="utf-8")
