"""Scheduler classes of a user's own. Nothing in them is vLLM's beyond the names they call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from kvmend_fixes.proofs import _vllm_parts as parts


class Noting(Scheduler):
    """Adds to vLLM's scheduler: notes how long its queue was."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.noted = [*getattr(self, "noted", []), len(self.waiting)]
        return super().schedule(*args, **kwargs)


class OwnLoop(Scheduler):
    """Schedules by itself, first come first served, whole prompts only, and never calls vLLM's `schedule()`.

    Knows lookup and admission as of 0.26 and earlier, which is what copies of the scheduler out there do: on a
    natively fixed release such a scheduler counts nothing.

    Attributes:
        lookups: What each lookup returned.
    """

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
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
            request = self.waiting.peek_request()
            found: tuple[Any, ...] = self.kv_cache_manager.get_computed_blocks(request)
            lookups.append(found)
            blocks, hits, *_ = found
            missing = request.num_tokens - hits
            if self.kv_cache_manager.allocate_slots(request, missing, hits, blocks) is None:
                break
            self.running.append(self.waiting.pop_request())
            request.status = RequestStatus.RUNNING
            computed[request.request_id] = hits
            tokens[request.request_id] = missing
            request.num_computed_tokens = request.num_tokens
        return self._output(tokens, computed)

    def _output(self, tokens: dict[str, int], computed: dict[str, int]) -> Any:
        rows = [SimpleNamespace(req_id=id_, num_computed_tokens=before) for id_, before in computed.items()]
        return SchedulerOutput(
            **parts.known_arguments(
                SchedulerOutput,
                scheduled_new_reqs=rows,
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
