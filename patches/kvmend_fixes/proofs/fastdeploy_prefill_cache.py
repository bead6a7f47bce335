"""Proof of fastdeploy-prefill-cache: a prefill node's own managers, a few requests, no GPU and no model."""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace
from typing import Any

from kvmend.api import Case

_BLOCK, _BLOCKS, _SLOTS = 4, 64, 8
_PROMPT = list(range(100, 132))
_SERIAL = itertools.count(1)


def measure() -> list[Case]:
    """Runs the smallest case of each fault on the installed FastDeploy.

    Raises:
        ImportError: FastDeploy, or what it needs, is not installed.
    """
    # Later releases keep blocks for decoding, and a pool as small as this has none to spare.
    os.environ.setdefault("FD_RESERVE_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL", "0")
    os.environ.setdefault("FD_RESERVE_MIN_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL", "0")
    os.environ.setdefault("FD_USE_NEW_TOKEN_RATIO_RESERVE", "0")
    return [*_twice(), *_refused(), *_overtaken(), *_crowded()]


def _twice() -> list[Case]:
    with _Node() as node:
        node.preallocate("first", _PROMPT)
        hit = node.preallocate("second", _PROMPT)
    return [
        Case(
            name="the same prompt twice before scheduling: the second request finds all of its 32 tokens",
            expected=32,
            measured=hit,
        )
    ]


def _refused() -> list[Case]:
    with _Node() as node:
        node.preallocate("x", _PROMPT)
        node.refuse("x")
        node.preallocate("y", _PROMPT)
        node.accept("y")
        node.step()
        told = node.requests["y"].num_cached_tokens
        unwritten = node.unwritten
    return [
        Case(
            name="after a request that the decode node refused, the same prompt reads no KV that nobody computed",
            expected=0,
            measured=unwritten,
        ),
        Case(name="and reports no cached tokens", expected=0, measured=told),
    ]


def _overtaken() -> list[Case]:
    with _Node() as node:
        node.preallocate("r1", _PROMPT)
        node.preallocate("r2", _PROMPT)
        node.accept("r2")
        node.step()
        node.accept("r1")
        node.step()
        unwritten, computed = node.unwritten, node.computed
    return [
        Case(
            name="a request that is scheduled before the one whose blocks it matched reads no KV that nobody computed",
            expected=0,
            measured=unwritten,
        ),
        Case(
            name="and two such requests compute the prompt once, the last block twice (tokens)",
            expected=len(_PROMPT) + _BLOCK,
            measured=computed,
        ),
    ]


def _crowded() -> list[Case]:
    """Requests that share beginnings of three prompts come and go, more of them than the pool holds at a time."""
    with _Node() as node:
        for turn in range(160):
            stem = [1000 * (turn * 7 % 3) + token for token in range(32)]
            node.preallocate(str(turn), stem[: 12 + turn * 5 % 21] + [turn] * (turn % 4))
            answered = str(turn - 4 if turn % 2 else turn - 2)
            if answered in node.requests:
                (node.refuse if turn % 6 == 5 else node.accept)(answered)
            node.step(budget=8 + turn * 11 % 40)
            for old in [old for old in node.requests if int(old) <= turn - 6]:
                node.finish(old)
        for old in list(node.requests):
            node.finish(old)
        unwritten, lost = node.unwritten, node.lost()
    return [
        Case(name="a crowd of requests with shared beginnings reads no KV that nobody computed", expected=0,
             measured=unwritten),
        Case(name="and leaves every block free, or evictable, once", expected=0, measured=lost),
    ]  # fmt: skip


class _Node:
    """A prefill node of 64 blocks of 4 tokens; knows which block was last written for which beginning of a prompt."""

    def __init__(self) -> None:
        from fastdeploy.engine.request import Request
        from fastdeploy.engine.sched.resource_manager_v1 import ResourceManagerV1

        self._request_type: Any = Request
        self.config = _config()
        self.manager: Any = ResourceManagerV1(
            max_num_seqs=_SLOTS, config=self.config, tensor_parallel_size=1, splitwise_role="prefill"
        )
        self.manager.cache_manager.prefix_tree_status_signal = SimpleNamespace(value=[0])
        self.requests: dict[str, Any] = {}
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.unwritten = 0
        self.computed = 0

    def __enter__(self) -> _Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.need_block_num_signal.clear()

    def preallocate(self, name: str, prompt: list[int]) -> int | None:
        """Tokens that the request is told are cached; None if there is no room."""
        request = self._request_type.from_dict(
            {"request_id": name, "prompt_token_ids": list(prompt), "prompt_token_ids_len": len(prompt),
             "arrival_time": 0.0}
        )  # fmt: skip
        request.output_token_ids, request.multimodal_inputs, request.disaggregate_info = [], {}, {}
        request.async_process_futures = []
        if not self.manager.preallocate_resource_in_p(request):
            return None
        self.requests[name] = request
        return int(request.num_cached_tokens)

    def refuse(self, name: str) -> None:
        """The decode node has no room."""
        request = self.requests.pop(name)
        if hasattr(self.manager, "pre_recycle_resource"):
            self.manager.pre_recycle_resource(name)
        else:
            self.manager.prerelease_resource(request)

    def accept(self, name: str) -> None:
        """The decode node has room."""
        self.manager.add_request_in_p([self.requests[name]])

    def finish(self, name: str) -> None:
        """The blocks are sent, or the request goes before it is answered."""
        if self.requests[name] not in self.manager.running:
            self.refuse(name)
            return
        del self.requests[name]
        self.manager.finish_requests(name)

    def step(self, budget: int = 128) -> None:
        """Schedules a batch and writes what its chunks compute; counts positions read that hold something else."""
        self.config.scheduler_config.max_num_batched_tokens = budget
        scheduled = self.manager.schedule()
        for request in scheduled[0] if isinstance(scheduled, tuple) else scheduled:
            prompt, table = request.prompt_token_ids, request.block_tables
            start, end = request.prefill_start_index, request.prefill_end_index
            for position in range(0, start, _BLOCK):
                wanted = tuple(prompt[: min(position + _BLOCK, start)])
                if self.blocks.get(table[position // _BLOCK], ())[: len(wanted)] != wanted:
                    self.unwritten += len(wanted) - position
            for position in range(start // _BLOCK * _BLOCK, end, _BLOCK):
                self.blocks[table[position // _BLOCK]] = tuple(prompt[: min(position + _BLOCK, end)])
            self.computed += end - start

    def lost(self) -> int:
        """Blocks that cannot be had again although nobody holds them, and blocks that are free twice."""
        cache = self.manager.cache_manager
        cache.can_allocate_gpu_blocks(_BLOCKS)
        free = cache.gpu_free_block_list
        return _BLOCKS - len(set(free)) + len(free) - len(set(free))


def _config() -> Any:
    port = 20_000 + (os.getpid() * 131 + next(_SERIAL)) % 40_000
    cache = SimpleNamespace(
        block_size=_BLOCK,
        total_block_num=_BLOCKS,
        prefill_kvcache_block_num=_BLOCKS,
        num_cpu_blocks=0,
        enable_hierarchical_cache=False,
        enable_prefix_caching=True,
        enable_output_caching=False,
        kvcache_storage_backend=None,
        write_policy="write_through",
        bytes_per_token_per_layer=1,
        bytes_per_layer_per_block=1,
        enc_dec_block_num=1,
        dec_token_num=_BLOCK,
        max_block_num_per_seq=_BLOCKS,
        max_encoder_cache=0,
        max_processor_cache=0,
        disable_chunked_mm_input=False,
        prealloc_dec_block_slot_num_threshold=0,
    )
    return SimpleNamespace(
        cache_config=cache,
        model_config=SimpleNamespace(enable_mm=False, architectures=["proof"], max_model_len=_BLOCK * _BLOCKS),
        enable_mm_runtime=False,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, local_engine_worker_queue_port=port, engine_worker_queue_port=[port]
        ),
        scheduler_config=SimpleNamespace(splitwise_role="prefill", max_num_batched_tokens=128, max_num_seqs=_SLOTS),
        speculative_config=SimpleNamespace(method=None, num_speculative_tokens=0),
        graph_opt_config=SimpleNamespace(),
        routing_replay_config=None,
    )
