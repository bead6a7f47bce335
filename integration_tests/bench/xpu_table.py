"""Prints who creates the KV tensors on XPU in 18 configurations, before and after, as the table in the READMEs.

Run as `python integration_tests/bench/xpu_table.py TREE...` with an interpreter that has Paddle; a tree is a folder
with the package `fastdeploy`. Each tree is measured in a process of its own, with FastDeploy's own code and stubbed
device calls. Sizes are those that the code asks for with the proof's small model: 50 MiB for one creator.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1]
_MEASURE = _TESTS / "fastdeploy_xpu" / "xpumeasure.py"


def measured(tree: Path) -> dict[str, Any]:
    """Every table of one tree, as `xpumeasure.py` writes them."""
    root = _TESTS.parent
    with tempfile.TemporaryDirectory(prefix="kvmend-xpu-") as folder:
        answer = Path(folder) / "answer.json"
        paths = [tree, root / "plugins", root / "patches", _TESTS]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVMEND")} | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "FD_LOG_DIR": str(Path(folder) / "log"),
            "FD_PLUGINS": "none",
            "KVMEND_TEST_PROBE_ONLY": "0",
        }
        command = [sys.executable, str(_MEASURE), str(answer)]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{tree}: {done.stderr.strip().splitlines()[-1]}")
        result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return result


def main(trees: list[str]) -> None:
    """Prints the table: a row per configuration, a column per tree, creators and MiB before → after."""
    tables = {Path(tree).name: measured(Path(tree)) for tree in trees}
    names = [row["name"] for row in next(iter(tables.values()))["plain"]["table"]]
    print("| configuration | " + " | ".join(tables) + " |")
    print("| --- |" + " --- |" * len(tables))
    totals = dict.fromkeys(tables, (0, 0))
    for number, name in enumerate(names):
        cells = []
        for tree, each in tables.items():
            before, after = each["plain"]["table"][number], each["mended"]["table"][number]
            counts = (max(before["counts"]), max(after["counts"]))
            sizes = (before["bytes"] >> 20, after["bytes"] >> 20)
            totals[tree] = (totals[tree][0] + sizes[0], totals[tree][1] + sizes[1])
            changed = counts[0] != counts[1]
            cells.append(f"**{counts[0]} → {counts[1]}** ({sizes[0]} → {sizes[1]} MiB)" if changed else f"{counts[1]}")
        print(f"| {name} | " + " | ".join(cells) + " |")
    print("| MiB in all | " + " | ".join(f"{before} → {after}" for before, after in totals.values()) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
