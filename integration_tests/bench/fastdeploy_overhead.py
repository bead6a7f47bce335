"""What kvmend costs a FastDeploy prefill node: CPU time of its resource manager, and memory per KV block.

    python integration_tests/bench/fastdeploy_overhead.py --trees 2.5 7364 2.6

Each tree, as released (twice) and with the fix, is a process of its own; all of them do the same blocks of work, in an
order that is drawn anew each time, so that a pair of figures was taken within a second. Two processes of the same
differ by a per cent or two in how their memory happens to lie: `without` is the mean of the two as released, one
against the other shows how far they lie apart, and each run starts all of them anew.

A block serves a request beside a number of live ones: half of these wait for the decode node, the other half are
prefilled and wait for their blocks to be fetched. Serving one is `preallocate_resource_in_p`, as many `schedule` calls
as its prompt takes, and `finish_requests`. The pool is so small that finished prompts are evicted.

Which comparison is honest: a tree that publishes at preallocation does there what 2.5 does in `schedule`, so that with
kvmend 2.5 moves work from one to the other. The sum over a whole request can be compared; the parts can be compared
on 7364 and 2.6, and between 2.5 with kvmend and 7364. Half of the prompts begin with 4,096 tokens that were computed
long ago, the others share nothing: every variant finds the same, and the workers check that.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import multiprocessing
import os
import random
import subprocess
import sys
import time
import tracemalloc
from collections import deque
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS / "fastdeploy"), str(_TESTS.parent / "plugins"), str(_TESTS.parent / "patches")]

from bench.measuring import Ratio, Report, arguments, compare, finish, pooled, row  # noqa: E402

LIVE = (10, 100, 400)
BLOCK = 64
LONGEST = 32_768
SHARED = 4096
BUDGET = 8192
PARTS = ("preallocate", "schedule", "whole request")
#: A worker on a tree as released, and a second one.
OFF, AGAIN = "off", "off again"
_TOKENS = list(range(65_536))
_MEMORY_REQUESTS = 40


class Traffic:
    """The prompts of one node, the same for every worker."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.shared = self._run(SHARED)
        self.made = 0

    def _run(self, tokens: int) -> list[int]:
        return list(map(_TOKENS.__getitem__, memoryview(self.chance.randbytes(2 * tokens)).cast("H")))

    def prompt(self) -> list[int]:
        """The next prompt: 1,024 to 32,768 tokens, every second one with the shared prefix."""
        self.made += 1
        length = self.chance.randint(1024, LONGEST)
        head = self.shared[:length] if self.made % 2 else []
        return head + self._run(length - len(head))


class Load:
    """A node of the tree under test with a number of live requests."""

    def __init__(self, tree: Any, live: int) -> None:
        from pnode import Options, PNode

        self.traffic, self.live = Traffic(live), live
        blocks = live * LONGEST // BLOCK * 6 // 10 + 8 * LONGEST // BLOCK
        self.tree = tree
        self.node = PNode(tree, Options(block_size=BLOCK, blocks=blocks, slots=live + 4, budget=BUDGET, reserve=1))
        self.manager = self.node.manager
        self.asked: deque[Any] = deque()
        self.done: deque[Any] = deque()
        self.spent = dict.fromkeys(PARTS, 0)
        self.found = self.steps = 0
        self.serve()  # the shared prefix is computed before anybody waits for it
        for number in range(live * 3 // 2):
            self.preallocate()
            if number >= live // 2:
                self.prefill()
            if number >= live:
                self.finish()

    def serve(self) -> None:
        """One request comes and one goes."""
        self.preallocate()
        self.prefill()
        self.finish()

    def preallocate(self) -> None:
        prompt = self.traffic.prompt()
        request = self.tree.request(str(self.traffic.made), prompt, {})
        started = time.thread_time_ns()
        done = self.manager.preallocate_resource_in_p(request)
        self.spent["preallocate"] += time.thread_time_ns() - started
        if not done:
            raise RuntimeError(f"the pool is too small for {self.live} requests")
        self.found += request.num_cached_tokens
        self.asked.append(request)

    def prefill(self) -> None:
        request = self.asked.popleft()
        self.manager.add_request_in_p([request])
        while not request.prefill_end_index or request.prefill_end_index < request.need_prefill_tokens:
            started = time.thread_time_ns()
            self.manager.schedule()
            self.spent["schedule"] += time.thread_time_ns() - started
            self.steps += 1
        self.done.append(request)

    def finish(self) -> None:
        request = self.done.popleft()
        started = time.thread_time_ns()
        self.manager.finish_requests(request.request_id)
        self.spent["whole request"] += time.thread_time_ns() - started

    def block(self, requests: int) -> dict[str, float]:
        """Serves some requests; CPU microseconds per request, tokens found and `schedule` calls."""
        self.spent, self.found, self.steps = dict.fromkeys(PARTS, 0), 0, 0
        gc.collect(1)  # all of it would take longer than the block
        gc.disable()
        for _ in range(requests):
            self.serve()
        gc.enable()
        self.spent["whole request"] = sum(self.spent.values())
        figures = {part: spent / requests / 1e3 for part, spent in self.spent.items()}
        return figures | {"found": self.found, "steps": self.steps}


def memory(tree: Any, number: int) -> float:
    """Bytes per KV block that preallocating some requests takes."""
    from pnode import Options, PNode

    traffic, count = Traffic(0), 0
    blocks = number * LONGEST // BLOCK
    node = PNode(tree, Options(block_size=BLOCK, blocks=blocks, slots=number, budget=BUDGET, reserve=1))
    requests = [tree.request(str(each), traffic.prompt(), {}) for each in range(number)]
    tracemalloc.start()
    for request in requests:
        assert node.manager.preallocate_resource_in_p(request)
        count += len(request.block_tables)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    node.close()
    return taken / count


def work(path: Path, modes: list[str]) -> None:
    """A server for one tree: forks a worker per mode, so that the tree is imported once, and passes lines on.

    A line on standard input is a mode, a tab and what its worker is to do: "live N", "block N" or "memory N", N being a
    number of requests. Each is answered with a line.
    """
    import fdtree

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stdout = sys.stderr
    # FastDeploy logs every block that it frees; without that, what kvmend adds is a larger share of less.
    logging.disable(logging.CRITICAL)
    # All on one core, which they take in turns: two cores of a machine are seldom equally busy.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with fdtree.loaded(path) as tree:
        gc.freeze()
        workers = {mode: _fork(tree, mode) for mode in modes}
        for line in sys.stdin:
            mode, _, what = line.rstrip().partition("\t")
            workers[mode].send(what)
            answers.write(json.dumps(workers[mode].recv()) + "\n")


def _fork(tree: Any, mode: str) -> Any:
    """A forked worker, which ends with this process, as this end of a pipe to it."""
    forking = multiprocessing.get_context("fork")
    ours, theirs = forking.Pipe()
    forking.Process(target=_serve, args=(tree, mode, theirs), daemon=True).start()
    return ours


def _serve(tree: Any, mode: str, questions: Any) -> None:
    load: Any = None
    with tree.fixed(mode) if mode not in (OFF, AGAIN) else contextlib.nullcontext():
        while True:
            what, number = questions.recv().split()
            answer: Any = None
            if what == "live":
                load = Load(tree, int(number))
            elif what == "block":
                answer = load.block(int(number))
            elif what == "memory":
                answer = memory(tree, int(number))
            questions.send(answer)


class Server:
    """A process per tree that does blocks of work when told to."""

    def __init__(self, python: str, tree: Path, modes: list[str]) -> None:
        self.name = tree.name
        command = [python, __file__, "--one", str(tree), *modes]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, line: str) -> Any:
        """What a worker answers to a line.

        Raises:
            RuntimeError: It has ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the workers on FastDeploy {self.name} ended at {line!r}")
        return json.loads(answer)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


#: Without, with, and what the pair says.
PAIRS = (
    (("2.5", OFF), ("2.5", "safe"), "moves work from schedule to preallocate: only the whole request compares"),
    (("7364", OFF), ("7364", "safe"), ""),
    (("2.6", OFF), ("2.6", "safe"), ""),
    (("7364", OFF), ("2.5", "safe"), "two trees that both publish at preallocation"),
)
TARGET = 1.02


def run(
    python: str, trees: dict[str, Path], lives: tuple[int, ...], rounds: int, requests: int, chance: random.Random
) -> dict[Any, Any]:
    """One run of every worker in turns: figures by number of live requests, worker and part."""
    keys = [*dict.fromkeys(key for pair in PAIRS for key in pair[:2] if key[0] in trees)]
    keys += [(tree, AGAIN) for tree, mode in keys if mode == OFF]
    chance.shuffle(keys)
    modes = {name: [mode for tree, mode in keys if tree == name] for name in trees}
    servers = {name: Server(python, path, modes[name]) for name, path in trees.items()}

    def ask(key: tuple[str, str], what: str) -> Any:
        return servers[key[0]].ask(f"{key[1]}\t{what}")

    found: dict[Any, Any] = {}
    try:
        for live in lives:
            for key in keys:
                ask(key, f"live {live}")
            for number in range(-1, rounds):
                chance.shuffle(keys)
                answers = {key: ask(key, f"block {requests}") for key in keys}
                # From 2.6 on those that wait for their blocks to be fetched take from the budget: only pairs are alike.
                for one, other, _ in PAIRS:
                    alike = one not in answers or other not in answers or _done(answers[one]) == _done(answers[other])
                    if not alike:
                        raise RuntimeError(f"{one} and {other} do not do the same: {answers}")
                for key, answer in answers.items() if number >= 0 else ():
                    for part in PARTS:
                        found.setdefault((live, key, part), []).append(answer[part])
            print(f"  {live} live requests measured", file=sys.stderr, flush=True)
        for key in keys:
            found["memory", key] = ask(key, f"memory {_MEMORY_REQUESTS}")
    finally:
        for server in servers.values():
            server.close()
    return found


def _done(answer: dict[str, float]) -> tuple[float, float]:
    """What has to be the same in two workers that are compared."""
    return answer["found"], answer["steps"]


def judged(pair: tuple[Any, Any, str], part: str) -> tuple[float | None, str]:
    """The target of a part of a pair, and what is to be said of it."""
    moved = pair[0] == ("2.5", OFF) and part != "whole request"
    return (None, pair[2]) if moved else (TARGET, "")


def compared(paths: list[Path]) -> dict[str, Path]:
    """Those of some trees that are in a pair, by name."""
    known = {name for pair in PAIRS for name, _ in pair[:2]}
    return {path.name: path for path in paths if path.name in known}


def rows(runs: list[dict[Any, Any]], trees: dict[str, Path], lives: tuple[int, ...]) -> list[Any]:
    """What the runs say of each pair."""
    rows = []
    for pair in PAIRS:
        one, other, _ = pair
        if one[0] not in trees or other[0] not in trees:
            continue
        title = f"{one[0]} without, {other[0]} with kvmend"
        for live in lives:
            for part in PARTS:
                ratios: list[Ratio] = [
                    compare(without(run, live, one[0], part), run[live, other, part]) for run in runs
                ]
                case = f"{title}, {live} live: {part}"
                rows.append(row(case, "us per request", together(ratios), *judged(pair, part)))
        if one == ("2.5", OFF):
            continue  # it has no blocks in the tree yet that could be compared
        bytes_ = compare([run["memory", one] for run in runs], [run["memory", other] for run in runs])
        rows.append(row(f"{title}: memory of a preallocated block", "bytes", bytes_))
    for tree in trees:
        for live in lives:
            for part in PARTS:
                ratios = [compare(run[live, (tree, OFF), part], run[live, (tree, AGAIN), part]) for run in runs]
                case = f"{tree} without, {live} live, measured a second time: {part}"
                rows.append(row(case, "us per request", together(ratios)))
    return rows


def together(ratios: list[Ratio]) -> Ratio:
    """Several runs as one; a single one keeps the interval of its pairs."""
    return pooled(ratios) if len(ratios) > 1 else ratios[0]


def without(run: dict[Any, Any], live: int, tree: str, part: str) -> list[float]:
    """Figures of a tree as released, as the mean of its two workers."""
    both = zip(run[live, (tree, OFF), part], run[live, (tree, AGAIN), part], strict=True)
    return [(one + other) / 2 for one, other in both]


def main() -> int:
    """Runs everything, prints and writes the report."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--trees", type=Path, nargs="*", help="folders of trees; default as for the tests")
    parser.add_argument("--python", default=os.environ.get("KVMEND_FASTDEPLOY_PYTHON", sys.executable))
    parser.add_argument("--live", type=int, nargs="*", default=LIVE, help="numbers of live requests")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--requests", type=int, default=1, help="requests in a block of work")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        work(Path(options.one[0]), options.one[1:])
        return 0
    import fdtree

    trees = compared(options.trees or fdtree.real_trees())
    lives = (10,) if options.quick else tuple(options.live)
    rounds, requests = (4, 1) if options.quick else (options.rounds, options.requests)
    runs = []
    for number in range(1 if options.quick else options.runs):
        print(f"run {number + 1}", file=sys.stderr, flush=True)
        runs.append(run(options.python, trees, lives, rounds, requests, random.Random(number)))
    return finish(Report("fastdeploy_overhead", rows(runs, trees, lives)), options.out)


if __name__ == "__main__":
    sys.exit(main())
