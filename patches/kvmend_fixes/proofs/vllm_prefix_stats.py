"""The proof of vllm-prefix-stats: prompt tokens looked up, as the installed scheduler reports them.

A real `Scheduler` is driven through the situations in which a request is looked up more than once before it is
admitted; what it reports must be what was admitted.
"""

from __future__ import annotations

from typing import Any

from kvmend.api import Case
from kvmend_fixes.proofs import _vllm_rig as rig

_BLOCK = 16
_PROMPT = 10 * _BLOCK
_DEFERRALS = 20


def measure() -> list[Case]:
    """The cases, each in its unit of the release: tokens, on 0.8.5 blocks."""
    cases = [_refused_by_the_pool()]
    if rig.connector_can_defer():
        cases += [_deferred_then_admitted(), _deferred_then_aborted()]
    return cases


def _looked_up(scheduler: Any, steps: int) -> int:
    """Prompt tokens looked up that a number of steps report."""
    return sum((rig.step(scheduler).local or {}).get("queries", 0) for _ in range(steps))


def _unit() -> int:
    """Tokens that one count stands for: a release that has no block hasher in its requests may count blocks."""
    scheduler = rig.build_scheduler(block_size=_BLOCK)
    # One token more than full blocks: a release that counts blocks sees ten.
    scheduler.add_request(rig.make_request(scheduler, "unit", range(_PROMPT + 1)))
    return 1 if _looked_up(scheduler, 1) == _PROMPT + 1 else _BLOCK


def _refused_by_the_pool() -> Case:
    unit = _unit()
    # The pool holds the first prompt and its output, not a second one beside it.
    scheduler = rig.build_scheduler(block_size=_BLOCK, num_blocks=_PROMPT // _BLOCK + 4)
    for name, first in (("runs", 0), ("waits", 1000)):
        request = rig.make_request(scheduler, name, range(first, first + _PROMPT + 1), max_tokens=_DEFERRALS)
        scheduler.add_request(request)
    reported = _looked_up(scheduler, 2 * _DEFERRALS + 2)
    return Case(
        name=f"two requests, one waits {_DEFERRALS} steps for KV blocks: lookups reported",
        expected=2 * ((_PROMPT + 1) // unit),
        measured=reported,
    )


def _deferred_then_admitted() -> Case:
    scheduler = rig.build_scheduler(block_size=_BLOCK, connector=True)
    scheduler.connector.script["late"] = [*[None] * _DEFERRALS, (0, False)]
    scheduler.add_request(rig.make_request(scheduler, "late", range(_PROMPT)))
    return Case(
        name=f"a connector defers a request {_DEFERRALS} times, then it is admitted: prompt tokens looked up",
        expected=_PROMPT,
        measured=_looked_up(scheduler, _DEFERRALS + 2),
    )


def _deferred_then_aborted() -> Case:
    scheduler = rig.build_scheduler(block_size=_BLOCK, connector=True)
    scheduler.connector.script["never"] = [None]
    scheduler.add_request(rig.make_request(scheduler, "never", range(_PROMPT)))
    reported = _looked_up(scheduler, _DEFERRALS)
    rig.abort(scheduler, "never")
    return Case(
        name=f"a connector defers a request {_DEFERRALS} times, then it is aborted: prompt tokens looked up",
        expected=0,
        measured=reported + _looked_up(scheduler, 1),
    )
