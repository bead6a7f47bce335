"""A scheduler class with a loop of its own, for proofs and tests. Nothing in it is vLLM's beyond the names it calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvmend_fixes.proofs._vllm_parts import known_arguments


def own_loop() -> Any:
    """Makes a scheduler class that admits whole prompts, first come first served, and never calls vLLM's `schedule()`.

    It knows lookup and admission as of 0.26 and earlier, which is what copies of the scheduler out there do: on a
    natively fixed release such a scheduler counts nothing. Its `lookups` are what each lookup returned.
    """
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    class OwnLoop(Scheduler):  # type: ignore[misc, unused-ignore]
        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            """One step: what each running request misses, then everybody who waits and fits."""
            lookups: list[tuple[Any, ...]] = self.__dict__.setdefault("lookups", [])
            tokens: dict[str, int] = {}
            computed: dict[str, int] = {}
            for request in self.running:
                missing = request.num_tokens - request.num_computed_tokens
                if missing > 0 and self.kv_cache_manager.allocate_slots(request, missing) is not None:
                    computed[request.request_id] = request.num_computed_tokens
                    tokens[request.request_id] = missing
                    request.num_computed_tokens += missing
            while self.waiting and len(self.running) < self.max_num_running_reqs:
                request = first_of(self.waiting)
                found: tuple[Any, ...] = self.kv_cache_manager.get_computed_blocks(request)
                lookups.append(found)
                blocks, hits, *_ = found
                missing = request.num_tokens - hits
                if self.kv_cache_manager.allocate_slots(request, missing, hits, blocks) is None:
                    break
                self.running.append(take_first(self.waiting))
                request.status = RequestStatus.RUNNING
                computed[request.request_id] = hits
                tokens[request.request_id] = missing
                request.num_computed_tokens = hits + missing
            return SchedulerOutput(
                **known_arguments(
                    SchedulerOutput,
                    scheduled_new_reqs=[
                        SimpleNamespace(req_id=id_, num_computed_tokens=before) for id_, before in computed.items()
                    ],
                    scheduled_cached_reqs=[],
                    num_scheduled_tokens=tokens,
                    total_num_scheduled_tokens=sum(tokens.values()),
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


def first_of(waiting: Any) -> Any:
    """The request at the head of the waiting queue, which is a plain deque up to 0.9.1."""
    return waiting.peek_request() if hasattr(waiting, "peek_request") else waiting[0]


def take_first(waiting: Any) -> Any:
    """Takes the request at the head of the waiting queue off it."""
    return waiting.pop_request() if hasattr(waiting, "pop_request") else waiting.popleft()
