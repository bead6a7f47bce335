"""Prints who creates the KV tensors on XPU in 18 configurations, before and after, as the table in the READMEs.

Run as `python integration_tests/bench/xpu_table.py TREE...` with an interpreter that has Paddle; a tree is a folder
with the package `fastdeploy`. Each tree is measured in a process of its own, with FastDeploy's own code and stubbed
device calls. Sizes are those that the code asks for with the proof's small model: 50 MiB for one creator.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS)]

from bench.measuring import machine  # noqa: E402

PYTHON = os.environ.get("KVMEND_FASTDEPLOY_PYTHON", sys.executable)
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
        command = [PYTHON, str(_MEASURE), str(answer)]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{tree}: {done.stderr.strip().splitlines()[-1]}")
        result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return result


def summed(tree: Path) -> dict[str, Any]:
    """Creators and MiB, before and after, of each configuration of one tree."""
    found = measured(tree)
    pairs = zip(found["plain"]["table"], found["mended"]["table"], strict=True)
    return {
        "tree": tree.name,
        "configurations": [
            {
                "name": before["name"],
                "creators": [max(before["counts"]), max(after["counts"])],
                "mib": [before["bytes"] >> 20, after["bytes"] >> 20],
            }
            for before, after in pairs
        ],
    }


def table(trees: list[dict[str, Any]]) -> list[str]:
    """A row per configuration, a column per tree, creators and MiB before → after."""
    lines = ["| configuration | " + " | ".join(each["tree"] for each in trees) + " |"]
    lines.append("| --- |" + " --- |" * len(trees))
    for rows in zip(*(each["configurations"] for each in trees), strict=True):
        cells = []
        for row in rows:
            (before, after), (many, few) = row["creators"], row["mib"]
            cells.append(f"{after}" if before == after else f"**{before} → {after}** ({many} → {few} MiB)")
        lines.append(f"| {rows[0]['name']} | " + " | ".join(cells) + " |")
    totals = [[sum(row["mib"][which] for row in each["configurations"]) for which in (0, 1)] for each in trees]
    lines.append("| MiB in all | " + " | ".join(f"{before} → {after}" for before, after in totals) + " |")
    return lines


def main() -> None:
    """Measures, prints the table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", type=Path, nargs="+")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="write the figures there, as JSON")
    options = parser.parse_args()
    trees = []
    for tree in options.trees:
        print(f"measuring {tree.name}", file=sys.stderr, flush=True)
        trees.append(summed(tree))
    print(*table(trees), sep="\n")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        content = {"bench": "xpu_table", "machine": machine(), "trees": trees}
        (options.out / "xpu_table.json").write_text(json.dumps(content) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
