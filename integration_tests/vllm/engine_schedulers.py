"""Schedulers of a user's own that an engine can run with (`--scheduler-cls`)."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus


class Noting(AsyncScheduler):
    """vLLM's default scheduler, and a note of how long its queue was."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.noted = [*getattr(self, "noted", []), len(self.waiting)]
        return super().schedule(*args, **kwargs)


class FirstComeFirstServed(Scheduler):
    """Admits whole prompts in the order they came, and never calls vLLM's `schedule()`.

    It preempts nobody, so that a request must be sure of its next blocks once it runs. As copies of the scheduler do
    that were made before 0.27, it leaves the counting to the lookup.
    """

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        manager = self.kv_cache_manager
        manager.new_step_starts()
        tokens: dict[str, int] = {}
        going: list[tuple[Any, Any]] = []
        for request in self.running:
            blocks = manager.allocate_slots(request, 1)
            assert blocks is not None, "this scheduler preempts nobody"
            going.append((request, blocks))
            tokens[request.request_id] = 1
        admitted = []
        budget = self.max_num_scheduled_tokens - len(tokens)
        while self.waiting and len(self.running) < self.max_num_running_reqs:
            request = self.waiting.peek_request()
            found, hits, *_ = manager.get_computed_blocks(request)
            new = request.num_tokens - hits
            if new > budget or manager.allocate_slots(request, new, hits, found) is None:
                break
            budget -= new
            self.waiting.pop_request()
            self.running.append(request)
            request.status, request.num_computed_tokens = RequestStatus.RUNNING, hits
            if request.prefill_stats is not None:
                request.prefill_stats.set(
                    num_prompt_tokens=request.num_tokens, num_local_cached_tokens=hits, num_external_cached_tokens=0
                )
            tokens[request.request_id] = new
            blocks = manager.get_blocks(request.request_id)
            admitted.append(NewRequestData.from_request(request, blocks.get_block_ids()))
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = admitted
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=[request.request_id for request, _ in going],
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[blocks.get_block_ids(allow_none=True) for _, blocks in going],
            num_computed_tokens=[request.num_computed_tokens for request, _ in going],
            num_output_tokens=[request.num_output_tokens for request, _ in going],
        )
        output.num_scheduled_tokens = tokens
        output.total_num_scheduled_tokens = sum(tokens.values())
        output.num_common_prefix_blocks = [0] * len(self.kv_cache_config.kv_cache_groups)
        output.finished_req_ids = self.finished_req_ids
        self._update_after_schedule(output)
        return output
