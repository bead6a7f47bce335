"""The prefix-cache hit rate that a real vLLM scheduler reports over a request trace, and the true one.

    KVMEND_VLLM_PREFIX_STATS=0 python integration_tests/bench/vllm_hit_rate.py --trace mooncake_conversation_trace.jsonl

Runs in an environment with a vLLM release and kvmend, with kvmend as its switch says. No engine: the release's own
scheduler and KV cache manager, with a clock in place of a model. Arrival times and prompts are those of the trace; a
step takes `--base` seconds and as long as its prompt tokens take at `--rate`. Of every four output tokens one is
generated, in a step that takes as long as four: a quarter of the retries, and of the time this takes. Two situations:

- KV pressure: the pool holds fewer requests than arrive, so that the head of the queue is looked up at every step;
- a deferring connector: the pool is large, and a KV connector answers "ask again later" until its own lookup is done,
  0.2 s after the request arrived on average.

The truth is kept by `support.ledger`, which watches from outside and calls none of vLLM's counting code.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS)]
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from bench import traces  # noqa: E402
from bench.measuring import machine  # noqa: E402

#: Situation to KV blocks of 16 tokens and the connector's mean delay in seconds.
SITUATIONS: dict[str, tuple[int, float | None]] = {
    "KV pressure": (40_000, None),
    "a deferring connector": (200_000, 0.2),
}
WINDOW = 60.0


class Replay:
    """One scheduler and the clock."""

    def __init__(self, records: list[traces.Record], situation: str, options: argparse.Namespace) -> None:
        from kvmend_fixes.proofs import _vllm_rig as rig
        from support.ledger import Ledger

        self.rig, self.records, self.options = rig, records, options
        blocks, self.delay = SITUATIONS[situation]
        self.scheduler = rig.build_scheduler(
            num_blocks=blocks,
            max_num_seqs=options.slots,
            max_num_batched_tokens=options.budget,
            connector=self.delay is not None,
            max_model_len=2**18,
        )
        self.ledger = Ledger(self.scheduler, apart=True)
        self.window = traces.windows(WINDOW, records[-1]["timestamp"] / 1000)
        self.reported: list[Counter[str]] = []
        self.true: list[Counter[str]] = []
        self.deferred: list[tuple[float, str]] = []
        self.now, self.steps = 0.0, 0

    def run(self) -> None:
        """Serves every request to its end."""
        arrived = 0
        while arrived < len(self.records) or self.scheduler.requests:
            while arrived < len(self.records) and self.records[arrived]["timestamp"] / 1000 <= self.now:
                self.add(str(arrived), self.records[arrived])
                arrived += 1
            while self.deferred and self.deferred[0][0] <= self.now:
                self.scheduler.connector.script[heapq.heappop(self.deferred)[1]] = [(0, False)]
            if not self.scheduler.requests:
                self.now = self.records[arrived]["timestamp"] / 1000
                continue
            self.step()

    def add(self, name: str, record: traces.Record) -> None:
        tokens = traces.tokens_of(record)
        request = self.rig.make_request(self.scheduler, name, tokens, max_tokens=-(-record["output_length"] // 4) or 1)
        if self.delay is not None:
            until = self.now + random.Random(int(name)).expovariate(1 / self.delay)
            heapq.heappush(self.deferred, (until, name))
            self.scheduler.connector.script[name] = [None]
        self.scheduler.add_request(request)

    def step(self) -> None:
        before = self.ledger.counts.copy()
        computed = {id_: request.num_computed_tokens for id_, request in self.scheduler.requests.items()}
        self.ledger.before_schedule()
        output = self.scheduler.schedule()
        self.ledger.after_schedule(output)
        prompt = sum(
            tokens for id_, tokens in output.num_scheduled_tokens.items()
            if computed[id_] < self.scheduler.requests[id_].num_prompt_tokens
        )  # fmt: skip
        done = self.rig.finish_step(self.scheduler, output)
        number = self.window(self.now)
        while len(self.reported) <= number:
            self.reported.append(Counter())
            self.true.append(Counter())
        self.reported[number].update(done.local or {})
        self.true[number].update(self.ledger.counts - before)
        self.steps += 1
        if self.steps % 2000 == 0:
            there = len(self.scheduler.requests)
            print(f"    {self.now:.0f} s of the trace, {there} requests", file=sys.stderr, flush=True)
        self.now += self.options.base + prompt / self.options.rate


def measure(records: list[traces.Record], situation: str, options: argparse.Namespace) -> dict[str, Any]:
    """One situation: counters of the whole run and per window of a minute."""
    replay = Replay(records, situation, options)
    began = time.perf_counter()
    replay.run()
    names = ("requests", "queries", "hits")
    return {
        "situation": situation,
        "steps": replay.steps,
        "clock": round(replay.now, 1),
        "seconds": round(time.perf_counter() - began, 1),
        "seen": dict(replay.ledger.seen),
        "windows": [
            {"from": number * WINDOW}
            | {f"reported_{name}": reported[name] for name in names}
            | {f"true_{name}": true[name] for name in names}
            for number, (reported, true) in enumerate(zip(replay.reported, replay.true, strict=True))
        ],
    }


def main() -> int:
    """Measures every situation in this process, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    traces.add_options(parser)
    parser.add_argument("--slots", type=int, default=128, help="requests that may run at once")
    parser.add_argument("--budget", type=int, default=8192, help="tokens per step")
    parser.add_argument("--rate", type=float, default=50_000, help="prompt tokens computed in a second")
    parser.add_argument("--base", type=float, default=0.04, help="seconds that a step takes in any case")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--quick", action="store_true", help="100 requests: shows that it runs")
    options = parser.parse_args()

    import vllm
    import vllm.v1.core.sched.scheduler  # what is there already is mended at once, and the outcome is final

    from kvmend.loading import apply_all

    (outcome,) = [each for each in apply_all("vllm") if each.fix == "vllm-prefix-stats"]
    variant = {"disabled": "as released", "applied": "with kvmend", "already_fixed": "fixed upstream"}
    who = f"vLLM {vllm.__version__.partition('+')[0]}, {variant.get(str(outcome.outcome), str(outcome.outcome))}"
    records, name = traces.load(options.trace, 100 if options.quick else options.requests)
    found = []
    print(f"{who}, {name}")
    for situation in SITUATIONS:
        found.append(measure(records, situation, options))
        total: Counter[str] = Counter()
        for window in found[-1]["windows"]:
            total.update(window)
        print(
            f"  {situation}: {total['reported_queries'] / total['true_queries']:.2f} times the lookups, hit rate "
            f"{total['reported_hits'] / total['reported_queries']:.3f} reported, "
            f"{total['true_hits'] / total['true_queries']:.3f} true ({found[-1]['seconds']} s)",
            flush=True,
        )
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        slug = who.lower().replace(",", "").replace(" ", "-").replace("vllm-", "")
        path = options.out / f"vllm_hit_rate-{slug}.json"
        content = {"bench": "vllm_hit_rate", "who": who, "trace": name, "machine": machine(), "situations": found}
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")
        print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
