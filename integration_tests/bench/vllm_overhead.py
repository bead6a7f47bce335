"""What a `schedule()` of vLLM costs with kvmend, relative to one without, and to one of a natively fixed release.

Run as `python -m bench.vllm_overhead [--out FOLDER] [--native PYTHON] [--rounds FILE] [--add FILE] [--sets N]` in
`integration_tests`, with an interpreter that has an affected vLLM; `PYTHON` is one that has vLLM 0.27 or later. The
file of `--rounds` gets every round, for pyperf to look at; those of an earlier run, of the same code on the same
machine, are counted too with `--add`, where one run leaves open whether a target is met.

Only ratios mean anything: there is no model, so that a step here is all scheduler. Each case is measured in many sets
of fresh processes, two without kvmend and two with it, in turns; see `vllm_steps` for the cases. A machine changes its
pace within tens of milliseconds, by half where memory is what a step waits for: a step that takes as long is taken by
all processes of a set at once, on one core, so that they share each moment's pace, and what counts is the CPU time that
each took. Two processes of the same differ by a per cent or two in how their memory happens to lie: a set compares the
mean of the two with that of the other two, and one of those without against the other shows how far they lie apart.
Prompts have 1,025 tokens, half of which are found in the cache, as nine in ten of a production trace have more than
981. What kvmend adds does not depend on them: rows with the smallest prompts, 33 tokens, have no target, and show the
most it can be.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Listener
from pathlib import Path
from threading import Lock
from typing import Any

from bench.measuring import Ratio, Report, arguments, compare, finish, pooled, row
from bench.rounds import read_rounds, write_rounds
from bench.vllm_steps import CASES, SMALLEST, Order

TARGET = 1.01
SIZES = (10, 100, 1000)
EVERY = (*CASES, *(case + SMALLEST for case in CASES[:2]))
#: How a treatment is called in a report.
LABELS = {
    "with": "kvmend",
    "without again": "nothing, measured a second time",
    "native": "a release that is natively fixed",
}
#: What is in place in the processes of a set, beside the natively fixed release.
_TREATMENTS = ("without", "without again", "with", "with again")
#: Requests in a block: so many that it takes milliseconds, and so few that a pair was taken within a moment. A machine
#: changes its pace within tens of milliseconds, so many small pairs say more than a few large ones. A block that is a
#: single step may take longer than that: then all processes do theirs together on the one core, which the system gives
#: them in turns of a few milliseconds, and each is asked what CPU time it took.
_BLOCK = {"deferred": 300, "admitted": 20, "decode": 300}
#: Sets of processes, and seconds for a case in a set. As processes of the same differ, many short sets say more than a
#: few long ones. An admission takes four times as long outside the clock as inside.
_SETS = 16
_SECONDS = {"deferred": 3.0, "admitted": 4.0, "decode": 3.0}
_LEAST_ROUNDS = 6
#: A set takes the smallest size twice, each time in fresh processes: there one per cent is a microsecond.
_TIMES = {SIZES[0]: 2}


class Fleet:
    """Processes that have vLLM imported and fork what is measured.

    Each set has its own: where they have put what they imported, all that they fork has it.

    Args:
        pythons: Name to interpreter, one process each.
        folder: For the sockets.
        core: The one that they and what they fork take in turns: two cores of a machine are seldom equally busy.
    """

    def __init__(self, pythons: dict[str, str], folder: Path, core: int) -> None:
        folder.mkdir()
        self._listeners = {name: Listener(str(folder / name)) for name in pythons}
        self._processes = [_start(python, self._listeners[name].address, core) for name, python in pythons.items()]
        self.hosts = {name: listener.accept() for name, listener in self._listeners.items()}

    def end(self) -> None:
        """Ends them."""
        for host in self.hosts.values():
            host.send(None)
        for process in self._processes:
            process.wait(timeout=60)
        for listener in self._listeners.values():
            listener.close()

    def child(self, host: str, order: Order) -> Any:
        """The connection to a fresh child that is ready to be asked."""
        self.hosts[host].send(order)
        child = self._listeners[host].accept()
        answer = child.recv()
        if answer != "ready":
            raise SystemExit(f"{order}: {answer}")
        return child


def _start(python: str, address: Any, core: int) -> subprocess.Popen[bytes]:
    here = Path(__file__).resolve().parents[1]
    environment = os.environ | {"PYTHONPATH": str(here), "KVMEND": "0", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([python, "-m", "bench.vllm_steps", address, str(core)], env=environment)


def measured(fleet: Fleet, case: str, requests: int, seconds: float) -> dict[str, list[float]]:
    """Seconds per step by treatment, round by round, each treatment in a fresh process.

    Args:
        fleet: Where to fork them.
        case: As in `Order`.
        requests: As in `Order`.
        seconds: How long to go on; some rounds at least, each a block of every treatment.
    """
    turns = [("affected", treatment) for treatment in _TREATMENTS]
    turns += [("native", "without")] if "native" in fleet.hosts else []
    steps = max(1, _BLOCK[case.removesuffix(SMALLEST)] // requests)
    together = steps == 1
    chance = random.Random()
    children = {}
    for turn in chance.sample(turns, len(turns)):
        children[turn] = fleet.child(turn[0], Order(case, requests, turn[1], together))
    figures: dict[str, list[float]] = {_name(*turn): [] for turn in turns}
    end = time.monotonic() + seconds
    number = -2
    while (number := number + 1) < _LEAST_ROUNDS or time.monotonic() < end:
        # By chance: what a block leaves in the processor's caches, the next one has.
        order = chance.sample(turns, len(turns))
        for group in [order] if together else [[turn] for turn in order]:
            found = block_of_each([children[turn] for turn in group], steps, together)
            for turn, figure in zip(group, found, strict=True) if number >= 0 else ():
                figures[_name(*turn)].append(figure)
    for child in children.values():
        child.send(None)
        child.close()
    return figures


def block_of_each(children: list[Any], steps: int, together: bool) -> list[float]:
    """Has each child do a block, and returns their seconds per step; together, they begin when all are ready to."""
    for child in children:
        child.send(steps)
    if together:
        for child in children:
            child.recv()
        for child in children:
            child.send("begin")
    return [child.recv() for child in children]


def ratios(figures: dict[str, list[float]]) -> dict[str, Ratio]:
    """What a set says, in microseconds: each treatment to those without, and those without to each other."""
    micro = {name: [each * 1e6 for each in found] for name, found in figures.items()}
    without = _means(micro["without"], micro["without again"])
    found = {
        "with": compare(without, _means(micro["with"], micro["with again"])),
        "without again": compare(micro["without"], micro["without again"]),
    }
    return found | ({"native": compare(without, micro["native"])} if "native" in micro else {})


def by_treatment(case: str, rounds: dict[str, list[list[float]]]) -> dict[str, list[Ratio]]:
    """The ratios of every set, by treatment, from the rounds of every process.

    Args:
        case: The case with its number of requests, as in `rounds`.
        rounds: Case and treatment, with ": " between, to the processes and each one's seconds per step.

    Raises:
        SystemExit: There is none of the case, or there are fewer processes of one treatment than of another.
    """
    found = {name.removeprefix(f"{case}: "): each for name, each in rounds.items() if name.startswith(f"{case}: ")}
    if missing := [each for each in _TREATMENTS if each not in found]:
        raise SystemExit(f"{case}: no rounds of {', '.join(missing)}")
    if len({len(processes) for processes in found.values()}) > 1:
        number = {name: len(processes) for name, processes in found.items()}
        raise SystemExit(f"{case}: as many processes of each treatment are expected, and there are {number}")
    ratios_: dict[str, list[Ratio]] = {}
    for processes in zip(*found.values(), strict=True):
        for name, ratio in ratios(dict(zip(found, processes, strict=True))).items():
            ratios_.setdefault(name, []).append(ratio)
    return ratios_


def _means(one: list[float], other: list[float]) -> list[float]:
    return [sum(pair) / 2 for pair in zip(one, other, strict=True)]


def target_of(case: str, treatment: str) -> float | None:
    """What the ratio should be at the most: that of kvmend, with prompts as servers get them."""
    return TARGET if treatment == "with" and not case.endswith(SMALLEST) else None


def _name(host: str, treatment: str) -> str:
    return "native" if host == "native" else treatment


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--native", metavar="PYTHON", help="interpreter with vLLM 0.27 or later")
    parser.add_argument("--case", choices=EVERY, action="append", help="only this one; may be repeated")
    parser.add_argument("--requests", type=int, choices=SIZES, action="append", help="only so many; may be repeated")
    parser.add_argument("--rounds", metavar="FILE", type=Path, help="write every round there, for pyperf to look at")
    parser.add_argument("--add", metavar="FILE", type=Path, action="append", default=[], help="count these rounds too")
    parser.add_argument("--sets", metavar="N", type=int, help=f"sets of processes, {_SETS} if not said; 0 with --add")
    options = parser.parse_args()
    sets, share = (2, 0.0) if options.quick else (_SETS, 1.0)
    if options.sets is not None:
        sets = options.sets
    if sets < (0 if options.add else 1):
        parser.error(f"--sets is {sets}, and has to be 1 or more, or 0 with --add")
    pythons = {"affected": sys.executable}
    if options.native:
        pythons["native"] = options.native
    cases = [(case, number) for case in options.case or EVERY for number in options.requests or SIZES]
    rounds: dict[str, list[list[float]]] = {}
    noting = Lock()
    cores = sorted(os.sched_getaffinity(0))[:sets]

    def take(core: int) -> None:
        """Every so manyth set, on a core of its own."""
        for number in range(cores.index(core), sets, len(cores)):
            fleet = Fleet(pythons, Path(folder) / str(number), core)
            for case, requests in (each for each in cases for _ in range(_TIMES.get(each[1], 1))):
                print(f"  set {number + 1} of {sets}: {case}, {requests} requests", file=sys.stderr, flush=True)
                figures = measured(fleet, case, requests, share * _SECONDS[case.removesuffix(SMALLEST)])
                with noting:  # the processes of a set stand at the same place under each name
                    for name, found in figures.items():
                        rounds.setdefault(f"{case}, {requests} requests: {name}", []).append(found)
            fleet.end()

    with tempfile.TemporaryDirectory(prefix="kvmend-bench-") as folder, ThreadPoolExecutor(len(cores) or 1) as threads:
        for _ in threads.map(take, cores):
            pass
    if options.rounds:
        write_rounds(options.rounds, rounds)
    for path in options.add:
        for name, processes in read_rounds(path).items():
            rounds.setdefault(name, []).extend(processes)
    runs = {(case, requests): by_treatment(f"{case}, {requests} requests", rounds) for case, requests in cases}
    report = Report("vllm_overhead")
    for name in LABELS:
        for case, requests in [each for each in cases if name in runs[each]]:
            ratio = pooled(runs[case, requests][name])
            # From the ratio: medians of either side lie further apart than pairs do on a busy machine.
            each = (ratio.median - 1) * ratio.without / requests * 1000
            target = target_of(case, name)
            label = f"{case}, {requests} requests: {LABELS[name]}"
            report.rows.append(row(label, "us per step", ratio, target, f"{each:+.0f} ns per request"))
    return finish(report, options.out)


if __name__ == "__main__":
    raise SystemExit(main())
