"""Replays a request trace through the resource manager of a FastDeploy prefill node and prints a table.

    python integration_tests/bench/fastdeploy_replay.py --trace mooncake_conversation_trace.jsonl

The trace is as `traces` says; without one, a generated one is used. Arrival times are kept; the node computes `--rate`
tokens a second, the decode node answers after a random delay and refuses some requests. All randomness is seeded by
the request's number, so every tree and mode sees the same. Nothing is computed: an oracle keeps what each block would
hold, and counts positions that attention would read although nobody wrote them.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS / "fastdeploy"), str(_TESTS.parent / "plugins"), str(_TESTS.parent / "patches")]

from bench import traces  # noqa: E402
from bench.measuring import machine  # noqa: E402

MODES = ("off", "eager", "safe")
WINDOW = 60.0


class Replay:
    """One node and the clock."""

    def __init__(self, node: Any, records: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
        self.node, self.records, self.arguments = node, records, arguments
        self.events: list[tuple[float, int, str, int]] = []
        self.order = itertools.count()
        self.queue: deque[int] = deque()
        self.now = 0.0
        self.window = traces.windows(WINDOW, records[-1]["timestamp"] / 1000)
        self.windows: list[Counter[str]] = []
        self.so_far: Counter[str] = Counter()

    def at(self, when: float, what: str, number: int) -> None:
        heapq.heappush(self.events, (when, next(self.order), what, number))

    def run(self) -> None:
        """Serves every request to its end."""
        for number, record in enumerate(self.records):
            self.at(record["timestamp"] / 1000, "arrives", number)
        while self.events or self.node.entries or self.queue:
            while self.events and self.events[0][0] <= self.now:
                self.handle(*heapq.heappop(self.events)[2:])
            self.admit()
            chunks = self.node.step()
            self.note()
            if chunks:
                tokens = sum(chunk.end - chunk.start for chunk in chunks)
                self.now += max(tokens / self.arguments.rate, 0.005)
                for chunk in chunks:
                    if chunk.end >= chunk.need:
                        self.at(self.now + 0.05, "ends", int(chunk.name))
                self.node.chunks.clear()
            elif self.events:
                self.now = max(self.now, self.events[0][0])
            elif self.node.entries or self.queue:
                raise RuntimeError(f"the node stands still at {self.now:.1f} s with {len(self.queue)} requests waiting")

    def note(self) -> None:
        """What happened since the last call goes to the window that the clock is in."""
        node, oracle = self.node, self.node.oracle
        found = {"prompt": node.prompt_tokens, "hit": node.hit_tokens, "started": oracle.started}
        found |= {"scheduled": oracle.scheduled, "reads": oracle.reads, "poisoned": oracle.poisoned}
        while len(self.windows) <= self.window(self.now):
            self.windows.append(Counter())
        for name, value in found.items():
            self.windows[self.window(self.now)][name] += value - self.so_far[name]
        self.so_far = Counter(found)

    def handle(self, what: str, number: int) -> None:
        name = str(number)
        if what == "arrives":
            self.queue.append(number)
        elif what == "answer":
            refused = random.Random(number).random() < self.arguments.refused
            (self.node.refuse if refused else self.node.accept)(name)
        else:
            self.node.finish(name)

    def admit(self) -> None:
        while self.queue:
            number = self.queue[0]
            record = self.records[number]
            if "tokens" not in record:
                record["tokens"], record["labels"] = traces.tokens_of(record), traces.labels_of(record)
            if not self.node.preallocate(str(number), record["tokens"], labels=record["labels"]):
                return
            self.queue.popleft()
            del record["tokens"], record["labels"]
            delay = random.Random(-number - 1).expovariate(1 / self.arguments.answer)
            self.at(self.now + delay, "answer", number)


def measure(path: Path, mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One tree, one mode, in this process."""
    import fdtree
    from pnode import Options, PNode

    options = Options(
        block_size=arguments.block_size,
        blocks=arguments.blocks,
        slots=arguments.slots,
        budget=arguments.budget,
        reserve=1,
    )
    with fdtree.loaded(path) as tree, tree.fixed(mode) if mode != "off" else contextlib.nullcontext() as counters:
        node = PNode(tree, options)
        replay = Replay(node, traces.load(arguments.trace, arguments.requests)[0], arguments)
        began, failure = time.perf_counter(), ""
        try:
            replay.run()
            lost = node.lost()
        except Exception as error:
            failure, lost = f"{type(error).__name__}: {error}", -1
        oracle = node.oracle
        node.close()
        return {
            "tree": path.name,
            "mode": mode,
            "hit": node.hit_tokens / max(node.prompt_tokens, 1),
            "saving": oracle.saving,
            "most": oracle.most_saving,
            "poisoned": oracle.poisoned,
            "reads": oracle.reads,
            "lost": lost,
            "failure": failure,
            "clock": replay.now,
            "seconds": time.perf_counter() - began,
            "counters": counters.as_dict() if counters else {},
            "windows": [{"from": number * WINDOW} | window for number, window in enumerate(replay.windows)],
        }


def main() -> int:
    """Runs every tree and mode in a process of its own, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    traces.add_options(parser)
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--quick", action="store_true", help="at most 100 requests: shows that it runs")
    parser.add_argument("--trees", type=Path, nargs="*", help="folders of trees; default as for the tests")
    parser.add_argument("--modes", nargs="*", default=MODES, choices=MODES)
    parser.add_argument("--pairs", nargs="*", metavar="TREE:MODE", help="only these of the trees and modes")
    parser.add_argument("--python", default=os.environ.get("KVMEND_FASTDEPLOY_PYTHON", sys.executable))
    parser.add_argument("--block-size", type=int, default=traces.UNIT, help="tokens per KV block")
    parser.add_argument("--blocks", type=int, default=16_384, help="KV blocks of the node")
    parser.add_argument("--slots", type=int, default=64, help="requests the node can hold")
    parser.add_argument("--budget", type=int, default=8192, help="tokens per step")
    parser.add_argument("--rate", type=float, default=40_000, help="tokens the node computes in a second")
    parser.add_argument("--answer", type=float, default=0.2, help="mean delay of the decode node's answer in seconds")
    parser.add_argument("--refused", type=float, default=0.02, help="share of requests that the decode node refuses")
    parser.add_argument("--one", nargs=2, metavar=("TREE", "MODE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.requests = min(arguments.requests, 100) if arguments.quick else arguments.requests
    if arguments.one:
        print(json.dumps(measure(Path(arguments.one[0]), arguments.one[1], arguments)))
        return 0
    import fdtree

    name = traces.load(arguments.trace, arguments.requests)[1]
    found = []
    print("| tree | fix | hit rate | prefill saved | most any safe policy saves | poisoned reads | blocks lost |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    passed_on = sys.argv[1:]
    for path in arguments.trees or fdtree.real_trees() or [fdtree.double("late"), fdtree.double("early")]:
        for mode in arguments.modes:
            if arguments.pairs and f"{path.name}:{mode}" not in arguments.pairs:
                continue
            command = [arguments.python, __file__, *passed_on, "--one", str(path), mode]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            try:
                row = json.loads(done.stdout.splitlines()[-1])
            except (IndexError, ValueError):
                print(f"| {path.name} | {mode} | failed: {done.stderr[-300:]!r} |||||")
                continue
            print(
                f"| {row['tree']} | {row['mode']} | {row['hit']:.3f} | {row['saving']:.3f} | {row['most']:.3f} "
                f"| {row['poisoned']:,} of {row['reads']:,} | {row['failure'] or row['lost']} |",
                flush=True,
            )
            found.append(row)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        path = arguments.out / "fastdeploy_replay.json"
        content = {"bench": "fastdeploy_replay", "trace": name, "machine": machine(), "runs": found}
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")
        print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
