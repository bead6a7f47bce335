"""The proof of vllm-prefix-stats-copied-scheduler: prompt tokens looked up, as a scheduler with its own loop reports.

The same prompt is sent five times, as in https://github.com/vllm-project/vllm-ascend/issues/15744, to a scheduler
that has a `schedule()` of its own, and to vLLM's.
"""

from __future__ import annotations

from typing import Any

from kvmend.api import Case
from kvmend_fixes.proofs import _vllm_rig as rig
from kvmend_fixes.proofs._vllm_own_loop import own_loop

_BLOCK = 128
_PROMPT = 5457
_TIMES = 5


def measure() -> list[Case]:
    """The cases, in tokens."""
    cases = []
    for whose, scheduler_class in (("a schedule() of its own", own_loop()), ("vLLM's schedule()", None)):
        local = _five_times(scheduler_class)
        name = f"a scheduler with {whose}, the same {_PROMPT} tokens {_TIMES} times"
        found = _PROMPT // _BLOCK * _BLOCK
        cases += [
            Case(name=f"{name}: tokens looked up", expected=_TIMES * _PROMPT, measured=local["queries"]),
            Case(name=f"{name}: tokens found", expected=(_TIMES - 1) * found, measured=local["hits"]),
        ]
    return cases


def _five_times(scheduler_class: Any) -> dict[str, int]:
    """Queries and hits that all steps together report."""
    scheduler = rig.build_scheduler(block_size=_BLOCK, scheduler_class=scheduler_class)
    total = {"queries": 0, "hits": 0}
    for number in range(_TIMES):
        scheduler.add_request(rig.make_request(scheduler, f"run {number}", range(_PROMPT), max_tokens=2))
        while scheduler.requests:
            reported = rig.step(scheduler).local or {}
            total = {name: value + reported.get(name, 0) for name, value in total.items()}
    return total
