"""How many instructions a FastDeploy prefill node's resource manager takes with kvmend, relative to none.

    python integration_tests/bench/fastdeploy_instructions.py --trees 2.5 7364 2.6

The load is that of `fastdeploy_overhead`, which measures time, and so is what may be compared with what: there the
workers are processes of their own, which differ by some per cent in how their memory happens to lie. Counted with
valgrind, which a C compiler has to be beside; ten minutes a tree.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import sys
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS / "fastdeploy"), str(_TESTS.parent / "plugins"), str(_TESTS.parent / "patches")]

from bench import fastdeploy_overhead as load  # noqa: E402
from bench.counting import OPTION, Counter, counted, lacking  # noqa: E402
from bench.measuring import Report, arguments, compare, finish, row  # noqa: E402

MODES = (load.OFF, "safe")
#: What a request goes through, as `Load` calls it, and as the report does.
_STAGES = {"preallocate": "preallocate", "prefill": "schedule", "finish": "finish"}
#: Requests that are counted, and those that are served before, while CPython specialises its code.
_REQUESTS, _WARM_UP = 16, 24


class _Clock:
    """In place of the clock of `fastdeploy_overhead`: whoever asks for the time begins or ends to be counted."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self.counts = False

    def thread_time_ns(self) -> int:
        """No time."""
        if self.counts:
            self._counter.toggle()
        return 0


def count(counter: Counter, path: Path, lives: list[int]) -> None:
    """The program under callgrind: counts each stage of a tree, as released and with the fix."""
    import fdtree

    logging.disable(logging.CRITICAL)
    clock = _Clock(counter)
    load.time = clock  # type: ignore[assignment]
    with fdtree.loaded(path) as tree:
        gc.freeze()
        for live in lives:
            for mode in MODES:
                with tree.fixed(mode) if mode != load.OFF else contextlib.nullcontext():
                    node = load.Load(tree, live)
                    node.block(_WARM_UP)
                    for stage in _STAGES:
                        print(f"  {path.name}, {live} live, {mode}: {stage}", file=sys.stderr, flush=True)
                        with counter.part(f"{live} {mode} {stage}"):
                            serve(node, stage, clock)
                    node.node.close()


def serve(node: load.Load, counted_stage: str, clock: _Clock) -> None:
    """Serves requests, of which one stage is counted."""
    gc.collect()
    gc.disable()
    for _ in range(_REQUESTS):
        for stage in _STAGES:
            clock.counts = stage == counted_stage
            getattr(node, stage)()
        clock.counts = False
    gc.enable()


def rows(found: dict[str, dict[str, int]], lives: list[int]) -> list[Any]:
    """What the trees' counts say of each pair of `fastdeploy_overhead`."""
    made = []
    for pair in load.PAIRS:
        one, other, _ = pair
        if one[0] not in found or other[0] not in found:
            continue
        for live in lives:
            both = [
                {part: found[tree][f"{live} {mode} {stage}"] / _REQUESTS for stage, part in _STAGES.items()}
                for tree, mode in (one, other)
            ]
            for figures in both:
                figures["whole request"] = sum(figures.values())
            for part in load.PARTS:
                case = f"{one[0]} without, {other[0]} with kvmend, {live} live: {part}"
                ratio = compare([both[0][part]], [both[1][part]])
                made.append(row(case, "instructions per request", ratio, *load.judged(pair, part)))
    return made


def main() -> int:
    """Runs each tree's program, prints and writes the report."""
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--trees", type=Path, nargs="*", help="folders of trees; default as for the tests")
    parser.add_argument("--python", default=os.environ.get("KVMEND_FASTDEPLOY_PYTHON", sys.executable))
    parser.add_argument("--live", type=int, nargs="*", default=[*load.LIVE], help="numbers of live requests")
    parser.add_argument(OPTION, help=argparse.SUPPRESS)
    options = parser.parse_args()
    lives = options.live[:1] if options.quick else options.live
    if options.count:
        count(Counter(options.count), options.trees[0], lives)
        return 0
    if reason := lacking():
        print(f"fastdeploy_instructions skipped: {reason}")
        return 0
    import fdtree

    found = {}
    for name, path in load.compared(options.trees or fdtree.real_trees()).items():
        command = [options.python, __file__, "--trees", str(path), "--live", *map(str, lives)]
        found[name] = counted(command, {})
    return finish(Report("fastdeploy_instructions", rows(found, lives)), options.out)


if __name__ == "__main__":
    sys.exit(main())
