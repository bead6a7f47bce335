"""Random traffic for a prefill node: the same seed is the same arrivals and the same decisions on every node.

What happens to a request is drawn with the request, not when it happens, so two nodes that schedule differently are
still asked the same.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from pnode import PNode

PREFIXES = 3


@dataclass(frozen=True)
class Arrival:
    """A request and its fate.

    Attributes:
        name: Its id.
        step: When it arrives.
        prompt: Its tokens.
        answer: Steps until the decode node answers.
        refused: Whether the answer is no.
        aborted: Steps after the answer at which it is aborted if it has not been prefilled by then, or None.
        stay: Steps between its last chunk and its end.
    """

    name: str
    step: int
    prompt: list[int]
    answer: int
    refused: bool
    aborted: int | None
    stay: int


@dataclass
class Traffic:
    """One run's worth of arrivals, token budgets and preemptions."""

    arrivals: list[Arrival]
    budgets: list[int]
    preemptions: frozenset[int] = field(default_factory=frozenset)


def draw(seed: int, steps: int = 200, preempting: bool = False, rate: float = 0.7) -> Traffic:
    """Prompts of 4 to 70 tokens, most of them on one of three shared prefixes; a fifth is refused."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(1000) for _ in range(rng.randrange(24, 60))] for _ in range(PREFIXES)]
    arrivals = []
    for step in range(steps):
        if rng.random() < rate:
            shared = rng.choice(prefixes)[: rng.choice([8, 17, 30, 60, 60, 60])] if rng.random() < 0.94 else []
            own = [rng.randrange(1000) for _ in range(rng.choice([0, 0, 1, 3, 5, 10]) if shared else 40)]
            arrivals.append(
                Arrival(
                    name=f"r{len(arrivals)}",
                    step=step,
                    prompt=shared + own or [1],
                    answer=rng.randrange(0, 9),
                    refused=rng.random() < 0.2,
                    aborted=rng.randrange(0, 4) if rng.random() < 0.1 else None,
                    stay=rng.randrange(0, 4),
                )
            )
    budgets = [rng.choice([8, 13, 16, 32, 64, 128]) for _ in range(steps + 400)]
    preemptions = frozenset(step for step in range(steps) if preempting and rng.random() < 0.04)
    return Traffic(arrivals=arrivals, budgets=budgets, preemptions=preemptions)


def run(node: PNode, traffic: Traffic, check: bool = True) -> None:
    """Serves the traffic to its end and drains the node."""
    queue: deque[Arrival] = deque()
    answers: dict[int, list[Arrival]] = {}
    ends: dict[int, list[str]] = {}
    aborts: dict[int, list[str]] = {}
    away: dict[int, list[str]] = {}
    pending = deque(traffic.arrivals)
    for step, budget in enumerate(traffic.budgets):
        if not pending and not queue and not node.entries:
            break
        while pending and pending[0].step <= step:
            queue.append(pending.popleft())
        while queue and node.preallocate(queue[0].name, queue[0].prompt):
            arrival = queue.popleft()
            answers.setdefault(step + arrival.answer, []).append(arrival)
        for arrival in answers.pop(step, []):
            if arrival.refused:
                node.refuse(arrival.name)
                continue
            node.accept(arrival.name)
            if arrival.aborted is not None:
                aborts.setdefault(step + arrival.aborted, []).append(arrival.name)
        for name in aborts.pop(step, []):
            if name in node.entries and node.entries[name].state == "running":
                node.refuse(name)
        if step in traffic.preemptions:
            away.setdefault(step + 2, []).extend(node.preempt_all())
        for name in away.pop(step, []):
            if name in node.entries and node.entries[name].state == "preempted":
                node.reschedule(name)
        node.config.scheduler_config.max_num_batched_tokens = budget
        for chunk in node.step():
            if chunk.end >= chunk.need:
                ends.setdefault(step + int(chunk.name[1:]) % 4, []).append(chunk.name)
        for name in ends.pop(step, []):
            if name in node.entries and node.entries[name].state == "prefilled":
                node.finish(name)
        if check:
            node.check()
    node.drain()
    if check:
        node.check()
