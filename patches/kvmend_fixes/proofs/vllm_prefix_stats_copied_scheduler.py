"""The proof of vllm-prefix-stats-copied-scheduler: prompt tokens looked up, as a scheduler with its own loop reports.

The same prompt is sent five times, as in https://github.com/vllm-project/vllm-ascend/issues/15744, to a scheduler
that has a `schedule()` of its own, and to vLLM's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvmend.api import Case
from kvmend_fixes.proofs import _vllm_rig as rig
from kvmend_fixes.proofs._vllm_parts import known_arguments

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


def own_loop() -> Any:
    """A scheduler class that admits whole prompts in the order they came, and never asks vLLM's `schedule()`."""
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    class OwnLoop(Scheduler):  # type: ignore[misc, unused-ignore]
        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            """One step: a token for each that runs, and everybody who waits."""
            rows, planned = [], {}
            for request in self.running:
                if self.kv_cache_manager.allocate_slots(request, 1) is not None:
                    rows.append((request, request.num_computed_tokens, 1))
            while self.waiting:
                request = self.waiting.peek_request()
                blocks, hits, *_ = self.kv_cache_manager.get_computed_blocks(request)
                new = request.num_tokens - hits
                if self.kv_cache_manager.allocate_slots(request, new, hits, blocks) is None:
                    break
                self.running.append(self.waiting.pop_request())
                request.status = RequestStatus.RUNNING
                rows.append((request, hits, new))
            for request, before, new in rows:
                request.num_computed_tokens = before + new
                planned[request.request_id] = new
            return SchedulerOutput(
                **known_arguments(
                    SchedulerOutput,
                    scheduled_new_reqs=[
                        SimpleNamespace(req_id=request.request_id, num_computed_tokens=before)
                        for request, before, _ in rows
                    ],
                    scheduled_cached_reqs=[],
                    num_scheduled_tokens=planned,
                    total_num_scheduled_tokens=sum(planned.values()),
                    scheduled_spec_decode_tokens={},
                    scheduled_encoder_inputs={},
                    num_common_prefix_blocks=[0],
                    finished_req_ids=set(),
                    free_encoder_input_ids=[],
                    free_encoder_mm_hashes=[],
                    structured_output_request_ids={},
                    grammar_bitmask=None,
                )
            )

    return OwnLoop
