"""How many instructions a `schedule()` of vLLM takes with kvmend, relative to one without.

Run as `python -m bench.vllm_instructions [--out FOLDER]` in `integration_tests`, with an interpreter that has an
affected vLLM, where valgrind and a C compiler are installed; it takes some ten minutes. The cases are those of
`vllm_overhead`, which measures time. Instructions are no time, but the same program takes the same number of them
however busy the machine is, so that differences far below the noise of a clock are seen.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import vllm_steps
from bench.counting import OPTION, Counter, counted, lacking
from bench.measuring import Report, arguments, compare, finish, row
from bench.vllm_overhead import EVERY, LABELS, SIZES, target_of

#: Requests that are counted for one figure; steps at least in decoding, of which every sixteenth allocates blocks.
_COUNTED, _DECODING_STEPS = 480, 16
#: Requests that are served before, while the block pool fills, and those that go through each treatment before it is
#: counted, while CPython specialises its code.
_WARM_UP, _MEETING = 2000, 1000


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument(OPTION, metavar="LIBRARY", help="do the counting, under callgrind; for this program itself")
    options = parser.parse_args()
    sizes = SIZES[:1] if options.quick else SIZES
    if options.count:
        count(Counter(options.count), sizes)
        return 0
    if reason := lacking():
        print(f"vllm_instructions skipped: {reason}")
        return 0
    command = [sys.executable, "-m", "bench.vllm_instructions", *(["--quick"] if options.quick else [])]
    environment = {"PYTHONPATH": str(Path(__file__).resolve().parents[1]), "KVMEND": "0"}
    figures = per_request(counted(command, environment))
    report = Report("vllm_instructions")
    for treatment in vllm_steps.TREATMENTS[1:]:
        for case in EVERY:
            for requests in sizes:
                without, found = figures[case, requests, "without"], figures[case, requests, treatment]
                label = f"{case}, {requests} requests: {LABELS[treatment]}"
                target = target_of(case, treatment)
                note = f"{found - without:+,.0f}"
                report.rows.append(row(label, "instructions per request", compare([without], [found]), target, note))
    return finish(report, options.out)


def per_request(totals: dict[str, int]) -> dict[tuple[str, int, str], float]:
    """Instructions per request and step, by case, number of requests and treatment."""
    figures = {}
    for label, total in totals.items():
        case, requests, steps, treatment = label.split("|")
        figures[case, int(requests), treatment] = total / int(requests) / int(steps)
    return figures


def count(counter: Counter, sizes: tuple[int, ...]) -> None:
    """The program under callgrind: counts each treatment of each case."""

    def timed(call: Callable[[], Any]) -> tuple[float, Any]:
        return 0.0, counter.call(call)

    vllm_steps.first_scheduler()
    put = vllm_steps.treatments()
    gc.disable()
    for case in EVERY:
        for requests in sizes:
            put("with")  # a manager is met when it is made
            block = vllm_steps.maker(case)(requests)
            put("without")
            steps = max(_DECODING_STEPS if case == "decode" else 1, _COUNTED // requests)
            block(max(4, _WARM_UP // requests))
            gc.collect()
            for treatment in vllm_steps.TREATMENTS:
                print(f"  {case}, {requests} requests, {treatment}", file=sys.stderr, flush=True)
                # Each in a child of its own: all of them go on from the same requests, blocks and dictionaries.
                if os.fork() == 0:
                    put(treatment)
                    block(max(2, _MEETING // requests))
                    vllm_steps.timed = timed
                    with counter.part(f"{case}|{requests}|{steps}|{treatment}"):
                        block(steps)
                    os._exit(0)
                if os.wait()[1]:
                    raise SystemExit(f"{case}, {requests} requests, {treatment}: its process failed")


if __name__ == "__main__":
    raise SystemExit(main())
