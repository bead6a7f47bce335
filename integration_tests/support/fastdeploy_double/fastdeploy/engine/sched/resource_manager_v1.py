"""Scheduler of the double."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

from fastdeploy.cache_manager.prefix_cache_manager import PrefixCacheManager
from fastdeploy.engine.request import RequestStatus
from fastdeploy.metrics.metrics import main_process_metrics


class ResourceManagerV1:
    """Slots, queues and chunks of one node."""

    def __init__(self, max_num_seqs: int, config: Any, tensor_parallel_size: int, splitwise_role: str) -> None:
        self.max_num_seqs = max_num_seqs
        self.config = config
        self._cache, self._role = config.cache_config, config.scheduler_config.splitwise_role
        self.cache_manager = PrefixCacheManager(config, splitwise_role)
        self.lock = threading.Lock()
        self.requests: dict[str, Any] = {}
        self.waiting: deque[Any] = deque()
        self.running: list[Any] = []
        self.to_be_rescheduled_request_id_set: set[str] = set()
        self.stop_flags = [True] * max_num_seqs
        self.tasks_list: list[Any] = [None] * max_num_seqs
        self.need_block_num_signal = SimpleNamespace(clear=lambda: None)

    # -- what the prefill node is asked before it schedules

    def preallocate_resource_in_p(self, request: Any) -> bool:
        """Looks a request up and allocates all its blocks; False if there is no room."""
        assert self._role == "prefill", "preallocation is for prefill nodes"
        cache = self.config.cache_config
        with self.lock:
            if True not in self.stop_flags:
                return False
            prompt = request.prompt_token_ids
            request.need_prefill_tokens = len(prompt)
            wanted = self._blocks_of(request.need_prefill_tokens) + cache.enc_dec_block_num
            if cache.enable_prefix_caching:
                if cache.num_cpu_blocks > 0 and not self.cache_manager.can_allocate_gpu_blocks(wanted):
                    return False
                if not self.get_prefix_cached_blocks(request):
                    return False
                wanted -= request.cache_info[0]
            else:
                request.num_computed_tokens = 0
            if not self.cache_manager.can_allocate_gpu_blocks(wanted):
                self._free_blocks(request)
                return False
            self._allocate(request, wanted)
            self._enter(request)
            # early: if cache.enable_prefix_caching: self.cache_manager.update_cache_blocks(request, cache.block_size, request.need_prefill_tokens)  # noqa: E501
            return True

    def preallocate_resource_in_d(self, request: Any) -> bool:
        """Takes blocks for KV that a prefill node will send."""
        wanted = self._blocks_of(len(request.prompt_token_ids)) + self.config.cache_config.enc_dec_block_num
        with self.lock:
            if True not in self.stop_flags or not self.cache_manager.can_allocate_gpu_blocks(wanted):
                return False
            self._allocate(request, wanted)
            self._enter(request)
            return True

    def add_request(self, request: Any) -> None:
        """A request for a node that does everything itself."""
        with self.lock:
            self.waiting.append(request)
            self.requests.update({request.request_id: request})

    def get_prefix_cached_blocks(self, request: Any) -> bool:
        """Looks a request up, notes where it has to start and reports the hit."""
        size = self.config.cache_config.block_size
        blocks, matched, found = self.cache_manager.request_match_blocks(request, size)
        request.block_tables = blocks
        request.cache_info = [len(blocks), self._blocks_of(request.need_prefill_tokens - matched)]
        request.num_cached_tokens = matched
        start = matched - size if matched == request.need_prefill_tokens else matched
        if self._cache.disable_chunked_mm_input:
            start = self.revert_chunked_mm_input(request.multimodal_inputs, start)
        request.num_computed_tokens = start
        left = matched - start
        for tier in ("storage", "cpu", "gpu"):
            part = min(left, found[f"{tier}_match_token_num"])
            found[f"{tier}_match_token_num"] -= part
            left -= part
        first_time = not request.has_been_preempted_before
        if first_time:
            for tier in ("gpu", "cpu", "storage"):
                setattr(request.metrics, f"{tier}_cache_token_num", found[f"{tier}_match_token_num"])
            main_process_metrics.prefix_cache_token_num.inc(start)
            main_process_metrics.prefix_gpu_cache_token_num.inc(found["gpu_match_token_num"])
            main_process_metrics.prefix_cpu_cache_token_num.inc(found["cpu_match_token_num"])
        return True

    def revert_chunked_mm_input(self, mm_inputs: Any, matched_token_num: int) -> int:
        """The last block boundary at or before a position that is not inside an image."""
        size = self.config.cache_config.block_size
        for place in reversed((mm_inputs or {}).get("mm_positions", ())):
            if place.offset < matched_token_num < place.offset + place.length:
                matched_token_num = place.offset // size * size
        return matched_token_num

    def pre_recycle_resource(self, request_id: str) -> None:
        """Lets a request go that is not scheduled to its end."""
        with self.lock:
            request = self.requests.pop(request_id, None)
            if request is not None:
                self._leave(request)
                self._free_blocks(request)

    def add_request_in_p(self, requests: list[Any]) -> None:
        """The decode node has room for these."""
        with self.lock:
            self.running.extend(requests)

    # -- scheduling

    def schedule(self) -> tuple[list[Any], list[Any]]:
        """Chunks of running requests first, then of preempted ones, as far as the token budget goes."""
        with self.lock:
            chunks: list[Any] = []
            budget = self.config.scheduler_config.max_num_batched_tokens
            caching = self.config.cache_config.enable_prefix_caching
            size = self.config.cache_config.block_size
            for request in list(self.running):
                if budget <= 0:
                    break
                if request.num_computed_tokens >= request.need_prefill_tokens:
                    continue
                tokens = self._get_num_new_tokens(request, budget)
                wanted = self.get_new_block_nums(request, tokens)
                if not self.cache_manager.can_allocate_gpu_blocks(wanted):
                    break
                self._allocate(request, wanted)
                chunks.append(self._prepare_prefill_task(request, tokens))
                request.num_computed_tokens += tokens
                budget -= tokens
                if caching:  # late:
                    self.cache_manager.update_cache_blocks(request, size, request.num_computed_tokens)  # late:
            while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
                request = self.waiting[0]
                request.need_prefill_tokens = request.num_total_tokens
                if caching:
                    self.get_prefix_cached_blocks(request)
                tokens = self._get_num_new_tokens(request, budget)
                wanted = self.get_new_block_nums(request, tokens)
                if not self.cache_manager.can_allocate_gpu_blocks(wanted):
                    self._free_blocks(request)
                    break
                self.waiting.popleft()
                self.running.append(request)
                self._allocate(request, wanted)
                chunks.append(self._prepare_prefill_task(request, tokens))
                request.num_computed_tokens += tokens
                budget -= tokens
                if caching:
                    self.cache_manager.update_cache_blocks(request, size, request.num_computed_tokens)
                request.status = RequestStatus.RUNNING
                if self._role == "mixed":
                    self._enter(request)
            return chunks, []

    def _allocate(self, request: Any, wanted: int) -> None:
        request.block_tables.extend(self.cache_manager.allocate_gpu_blocks(wanted, request.request_id))

    def _get_num_new_tokens(self, request: Any, token_budget: int) -> int:
        return min(request.need_prefill_tokens - request.num_computed_tokens, token_budget)

    def get_new_block_nums(self, request: Any, num_new_tokens: int) -> int:
        missing = self._blocks_of(request.num_computed_tokens + num_new_tokens) - len(request.block_tables)
        return max(missing + (self.config.speculative_config.method is not None), 0)

    def _prepare_prefill_task(self, request: Any, new_token_num: int) -> Any:
        start = request.num_computed_tokens
        request.prefill_start_index, request.prefill_end_index = start, start + new_token_num
        return request

    # -- preemption and ends

    def preempted_all(self) -> None:
        """Takes the blocks of every running request away."""
        with self.lock:
            while self.running:
                request = self.running.pop()
                request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
                self._free_blocks(request)
                self.to_be_rescheduled_request_id_set.add(request.request_id)

    def reschedule_preempt_task(self, request_id: str) -> None:
        """Puts a preempted request first in the waiting queue."""
        with self.lock:
            self.to_be_rescheduled_request_id_set.discard(request_id)
            again = self.requests[request_id]
            again.has_been_preempted_before = True
            self.waiting.appendleft(again)

    def cache_output_tokens(self, request: Any) -> None:
        """Publishes generated tokens."""
        if self._cache.enable_output_caching:
            with self.lock:
                self.cache_manager.cache_output_blocks(request, self._cache.block_size)

    def finish_requests(self, request_id: str) -> None:
        """Lets a request go that is done."""
        with self.lock:
            request = self.requests.pop(request_id)
            running = request in self.running
            if running:
                self.running.remove(request)
            self.to_be_rescheduled_request_id_set.discard(request_id)
            self._leave(request)
        if running:
            self.cache_manager.write_cache_to_storage(request)
            with self.lock:
                self._free_blocks(request)

    def _enter(self, request: Any) -> None:
        request.idx = self.stop_flags.index(True)
        self.stop_flags[request.idx] = False
        self.tasks_list[request.idx] = self.requests[request.request_id] = request

    def _leave(self, request: Any) -> None:
        self.stop_flags[request.idx] = True
        self.tasks_list[request.idx] = None

    def _free_blocks(self, request: Any) -> None:
        owned = 0
        blocks = self.cache_manager
        if self._cache.enable_prefix_caching:
            blocks.release_block_ids(request)
            owned = request.num_cached_blocks
        blocks.recycle_gpu_blocks(request.block_tables[owned:], request.request_id)
        request.block_tables = []

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.config.cache_config.block_size)
