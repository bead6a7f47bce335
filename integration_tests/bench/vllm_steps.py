"""The worker side of `vllm_overhead`: real scheduling steps of the installed vLLM, timed in a forked child.

Run by `vllm_overhead` as `python -m bench.vllm_steps SOCKET CORE`. The process imports vLLM once and forks a child for
each `Order` it is sent. A child answers each message, a number of steps, with the CPU seconds of a scheduling step, as
the mean of those steps. As in a server, what is in place never changes in it.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

BLOCK = 16
CASES = ("deferred", "admitted", "decode")
#: Added to a case, it has the smallest prompts.
SMALLEST = ", smallest prompts"
#: Tokens of a prompt, and how many of them are found in the cache; of the prompts in the trace of `traces` nine in ten
#: have more than 981. Nothing that a fix does depends on them, so that the smallest ones show it best.
_PROMPT, _SMALLEST_PROMPT = (1025, 512), (33, 16)
#: Requests that a child serves before it is asked: CPython specialises its code for what is in place.
_MEETING = 1000
#: "without" kvmend, "with" it, and "without again", which shows how far two measurements of the same lie apart; "with
#: again" is known too.
TREATMENTS = ("without", "with", "without again")


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """What a child is to measure.

    Attributes:
        case: "deferred": a KV connector answers "not yet" for every waiting request. "admitted": all are admitted in
            one step. "decode": all are running and get one token each. Prompts are small in decoding, and in the others
            if `SMALLEST` is added.
        requests: Number of requests in the step.
        treatment: What is in place.
        together: Whether a step waits, when everything for it is ready, until it is told to begin.
    """

    case: str
    requests: int
    treatment: str
    together: bool = False


def main() -> None:
    """Forks a child for each order that comes in."""
    os.sched_setaffinity(0, {int(sys.argv[2])})
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
    global _before_step
    with Client(sys.argv[1]) as parent:
        try:
            put = treatments()
            put("with")  # a manager is met when it is made
            block = maker(order.case)(order.requests)
            put(order.treatment)
            block(max(3, _MEETING // order.requests))
            parent.send("ready")
        except Exception as error:  # a child that only dies would leave the parent waiting
            parent.send(f"{type(error).__name__}: {error}")
            return
        if order.together:
            _before_step = functools.partial(_wait, parent)
        while (steps := parent.recv()) is not None:
            parent.send(block(steps))


def _wait(parent: Any) -> None:
    """Tells the parent that a step is ready to begin, and waits for its word."""
    parent.send("ready")
    parent.recv()


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
    functions = {"without": without, "with": with_}

    def put(treatment: str) -> None:
        in_place = functions[treatment.removesuffix(" again")]
        for (owner, name), function, now in zip(places, in_place, without, strict=True):
            if now is not None:
                setattr(owner, name, function)

    return put


def _place(module: str, qualname: str) -> tuple[Any, str]:
    owner, _, name = qualname.rpartition(".")
    return getattr(sys.modules[module], owner, object), name


def deferred(case: str, requests: int) -> Callable[[int], float]:
    """Every waiting request is looked up at every step, and none is admitted."""
    world = World(case, requests, connector=True)
    connector = world.scheduler.connector
    connector.get_num_new_matched_tokens = lambda request, tokens: (0, False)
    world.add(1)  # leaves in the cache what the others find
    world.finish(world.schedule())
    connector.get_num_new_matched_tokens = lambda request, tokens: (None, False)
    world.add(requests)

    def step() -> float:
        seconds, output = timed(world.schedule)
        assert not output.num_scheduled_tokens
        return seconds

    return functools.partial(mean, step)


def admitted(case: str, requests: int) -> Callable[[int], float]:
    """Every waiting request is looked up and admitted in one step; then they leave, and as many come."""
    world = World(case, requests)

    def step() -> float:
        world.add(requests)
        seconds, output = timed(world.schedule)
        assert len(output.num_scheduled_tokens) == requests
        world.finish(output)
        return seconds

    return functools.partial(mean, step)


def decode(case: str, requests: int) -> Callable[[int], float]:
    """Every request is running; those that come to their end are replaced between two timed steps."""
    world = World(case, requests)

    def step() -> float:
        missing = requests - len(world.scheduler.running)
        if missing:
            world.add(missing)
            world.feed(world.schedule())
        seconds, output = timed(world.schedule)
        assert output.total_num_scheduled_tokens == requests
        world.feed(output)
        return seconds

    return functools.partial(mean, step)


def maker(case: str) -> Callable[[int], Callable[[int], float]]:
    """What makes a case for a number of requests: a function that runs a number of steps of it."""
    makers = {"deferred": deferred, "admitted": admitted, "decode": decode}
    return functools.partial(makers[case.removesuffix(SMALLEST)], case)


class World:
    """A scheduler with room for a number of requests, as `_vllm_rig` builds it."""

    def __init__(self, case: str, requests: int, connector: bool = False) -> None:
        from kvmend_fixes.proofs import _vllm_rig as rig

        self._rig = rig
        self._count = 0
        self._prompt, self._found = _PROMPT if case in ("deferred", "admitted") else _SMALLEST_PROMPT
        self._tokens = 256
        self.scheduler = rig.build_scheduler(
            block_size=BLOCK,
            num_blocks=requests * (self._prompt + self._tokens + 2 * BLOCK) // BLOCK + 64,
            max_num_seqs=requests,
            max_num_batched_tokens=max(8192, requests * 2 * self._prompt),
            connector=connector,
        )
        self._throttles = "throttle_prefills" in inspect.signature(self.scheduler.schedule).parameters

    def add(self, requests: int) -> None:
        """New requests in the waiting queue: what is found is shared by all, the rest is the request's own."""
        for _ in range(requests):
            self._count += 1
            first = 1000 + self._count * self._prompt
            own = range(first, first + self._prompt - self._found)
            request = self._rig.make_request(
                self.scheduler, f"request {self._count}", [*range(self._found), *own], max_tokens=self._tokens
            )
            self.scheduler.add_request(request)

    def schedule(self) -> Any:
        """A step, called as the engine core of the release calls it."""
        return self.scheduler.schedule(False) if self._throttles else self.scheduler.schedule()

    def feed(self, output: Any) -> None:
        """Gives every request that was scheduled its next token."""
        self._rig.finish_step(self.scheduler, output)

    def finish(self, output: Any) -> None:
        """Gives every request that was scheduled a token and ends it."""
        self.feed(output)
        for request_id in list(output.num_scheduled_tokens):
            self._rig.abort(self.scheduler, request_id)


def _before_step() -> None:
    """Is called right before a step is timed."""


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of one call on this thread, less those of the clock itself, and what it returned."""
    _before_step()
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
