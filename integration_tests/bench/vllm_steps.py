"""The worker side of `vllm_overhead`: real scheduling steps of the installed vLLM, timed in a forked child.

Run by `vllm_overhead` as `python -m bench.vllm_steps SOCKET`. The process imports vLLM once and forks a child for each
`Order` it is sent. A child answers each message, a number of steps, with the CPU seconds of a scheduling step, as the
mean of those steps. As in a server, what is in place never changes in it; children of one process are so much alike
that two with the same in place seldom differ by a per cent.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

#: Prompts are whole blocks and one token more; a lookup finds all of the blocks but for the requests' first.
BLOCK, PROMPT = 16, 33
CASES = ("deferred", "admitted", "decode")
#: Requests that a child serves before it is asked: CPython specialises its code for what is in place.
_MEETING = 2000
#: "without" kvmend, "with" it, and "without again", which shows how far two measurements of the same lie apart.
TREATMENTS = ("without", "with", "without again")


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """What a child is to measure.

    Attributes:
        case: "deferred": a KV connector answers "not yet" for every waiting request. "admitted": all are admitted in
            one step. "decode": all are running and get one token each.
        requests: Number of requests in the step.
        treatment: What is in place.
    """

    case: str
    requests: int
    treatment: str


def main() -> None:
    """Forks a child for each order that comes in."""
    # All on one core, which they take in turns: two cores of a machine are seldom equally busy.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    first_scheduler()
    gc.collect()
    gc.freeze()
    with Client(sys.argv[1]) as orders:
        while (order := orders.recv()) is not None:
            if os.fork() == 0:
                serve(order)
                os._exit(0)
            while True:
                try:
                    if os.waitpid(-1, os.WNOHANG)[0] == 0:
                        break
                except ChildProcessError:
                    break


def first_scheduler() -> None:
    """Pays for what the first scheduler of a process imports and caches."""
    from kvmend_fixes.proofs import _vllm_rig as rig

    rig.build_scheduler(num_blocks=64, connector=True)


def serve(order: Order) -> None:
    """A child: makes what is ordered, then times a block whenever it is asked to."""
    with Client(sys.argv[1]) as parent:
        try:
            put = treatments()
            put("with")  # a manager is met when it is made
            block = MAKERS[order.case](order.requests)
            put(order.treatment)
            block(max(3, _MEETING // order.requests))
            parent.send("ready")
        except Exception as error:  # a child that only dies would leave the parent waiting
            parent.send(f"{type(error).__name__}: {error}")
            return
        while (steps := parent.recv()) is not None:
            parent.send(block(steps))


def treatments() -> Callable[[str], None]:
    """A function that puts a treatment in place; on a release that needs no fix, all are the release itself."""
    from kvmend.loading import apply_all, remove_all
    from kvmend_fixes.vllm.prefix_stats import FIX

    os.environ["KVMEND"] = "1"
    (outcome,) = [result.outcome for result in apply_all("vllm") if result.fix == FIX.id]
    places = [_place(site.module, site.qualname) for site in FIX.sites if site.module in sys.modules]
    with_ = [vars(owner).get(name) for owner, name in places]
    remove_all()
    without = [vars(owner).get(name) for owner, name in places]
    if outcome not in ("applied", "already_fixed"):
        raise RuntimeError(f"vllm-prefix-stats is {outcome}")
    functions = {"without": without, "with": with_, "without again": without}

    def put(treatment: str) -> None:
        for (owner, name), function, now in zip(places, functions[treatment], without, strict=True):
            if now is not None:
                setattr(owner, name, function)

    return put


def _place(module: str, qualname: str) -> tuple[Any, str]:
    owner, _, name = qualname.rpartition(".")
    return getattr(sys.modules[module], owner, object), name


def deferred(requests: int) -> Callable[[int], float]:
    """Every waiting request is looked up at every step, and none is admitted."""
    world = World(requests, connector=True)
    world.scheduler.connector.get_num_new_matched_tokens = lambda request, tokens: (None, False)
    world.add(requests)

    def step() -> float:
        seconds, output = timed(world.scheduler.schedule)
        assert not output.num_scheduled_tokens
        return seconds

    return functools.partial(mean, step)


def admitted(requests: int) -> Callable[[int], float]:
    """Every waiting request is looked up and admitted in one step; then they leave, and as many come."""
    world = World(requests)

    def step() -> float:
        world.add(requests)
        seconds, output = timed(world.scheduler.schedule)
        assert len(output.num_scheduled_tokens) == requests
        world.finish(output)
        return seconds

    return functools.partial(mean, step)


def decode(requests: int) -> Callable[[int], float]:
    """Every request is running; those that come to their end are replaced between two timed steps."""
    world = World(requests)

    def step() -> float:
        missing = requests - len(world.scheduler.running)
        if missing:
            world.add(missing)
            world.feed(world.scheduler.schedule())
        seconds, output = timed(world.scheduler.schedule)
        assert output.total_num_scheduled_tokens == requests
        world.feed(output)
        return seconds

    return functools.partial(mean, step)


MAKERS: dict[str, Callable[[int], Callable[[int], float]]] = {
    "deferred": deferred,
    "admitted": admitted,
    "decode": decode,
}


class World:
    """A scheduler with room for a number of requests, as `_vllm_rig` builds it."""

    def __init__(self, requests: int, connector: bool = False) -> None:
        from kvmend_fixes.proofs import _vllm_rig as rig

        self._rig = rig
        self._count = 0
        self._tokens = 256
        self.scheduler = rig.build_scheduler(
            block_size=BLOCK,
            num_blocks=requests * (PROMPT + self._tokens + 2 * BLOCK) // BLOCK + 64,
            max_num_seqs=requests,
            max_num_batched_tokens=max(8192, requests * 64),
            connector=connector,
        )

    def add(self, requests: int) -> None:
        """New requests in the waiting queue: the first block is shared by all, the others are the request's own."""
        for _ in range(requests):
            self._count += 1
            own = range(1000 + self._count * PROMPT, 1000 + self._count * PROMPT + PROMPT - BLOCK)
            request = self._rig.make_request(
                self.scheduler, f"request {self._count}", [*range(BLOCK), *own], max_tokens=self._tokens
            )
            self.scheduler.add_request(request)

    def feed(self, output: Any) -> None:
        """Gives every request that was scheduled its next token."""
        self._rig.finish_step(self.scheduler, output)

    def finish(self, output: Any) -> None:
        """Gives every request that was scheduled a token and ends it."""
        self.feed(output)
        for request_id in list(output.num_scheduled_tokens):
            self._rig.abort(self.scheduler, request_id)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of one call on this thread, less those of the clock itself, and what it returned."""
    start = time.thread_time_ns()
    result = call()
    end = time.thread_time_ns()
    return (end - start - CLOCK) / 1e9, result


def _clock() -> int:
    """Nanoseconds between two looks at the clock."""
    found = []
    for _ in range(2001):
        start = time.thread_time_ns()
        found.append(time.thread_time_ns() - start)
    return sorted(found)[len(found) // 2]


CLOCK = _clock()


def mean(step: Callable[[], float], steps: int) -> float:
    """Seconds of a step, as the mean of several; garbage is collected before, not in between."""
    gc.collect(0)
    gc.disable()
    try:
        return sum(step() for _ in range(steps)) / steps
    finally:
        gc.enable()


if __name__ == "__main__":
    main()
