"""Writes what commands print into the pages that show it: `python -m doc_fill PAGE...`, then look at the difference.

Outputs with a line that ends in `…` are left alone: somebody has said what matters in them. A lone `…` is filled.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path

from doc_pages import RUNNABLE, blocks, matches, sandbox_of, steps
from doc_sandbox import DIFFERENT, SANDBOXES, run

_NOTHING_PRINTS_THIS = "\0"


def _cut_short(shown: str) -> bool:
    return shown.strip() != "…" and any(line.endswith("…") for line in shown.splitlines())


def fill(page: Path) -> int:
    """Fills the outputs of a page; returns how many have changed."""
    lines = page.read_text(encoding="utf-8").split("\n")
    wanted = [
        step for block in blocks(page) if block.language in RUNNABLE and not block.not_run for step in steps(block)
    ]
    asked = [
        dataclasses.replace(step, expected=_NOTHING_PRINTS_THIS)
        if step.expected and not _cut_short(step.expected)
        else dataclasses.replace(step, expected=None)
        for step in wanted
    ]
    with tempfile.TemporaryDirectory(prefix="kvmend-docs-") as folder:
        failures = run(asked, SANDBOXES[sandbox_of(page)](Path(folder) / "home"))
    changed = 0
    for failure in reversed(failures):
        if failure.step.expected is None or failure.reason != DIFFERENT:
            print(failure, file=sys.stderr)
            continue
        shown = next(step.expected for step in wanted if step.where == failure.step.where) or ""
        if matches(shown, failure.printed):
            continue
        start = int(failure.step.where.rpartition(":")[2]) + failure.step.command.count("\n")
        indent = lines[start - 1][: len(lines[start - 1]) - len(lines[start - 1].lstrip())]
        printed = [f"{indent}{line.rstrip()}".rstrip() for line in failure.printed.strip("\n").split("\n")]
        stop = start + shown.count("\n") + 1
        changed += 1
        lines[start:stop] = printed
    page.write_text("\n".join(lines), encoding="utf-8")
    return changed


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: {fill(Path(name).resolve())} outputs changed")
