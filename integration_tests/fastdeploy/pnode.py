"""Drives a prefill node's resource manager the way the engine does, with the oracle as its worker.

Works on every FastDeploy tree and on the double alike: it uses the methods that the engine uses and a configuration
that is a plain namespace.
"""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from support.kv_oracle import Chunk, KVOracle, labels_of

_SERIAL = itertools.count(1)
#: What the transfer manager is told, by the names of `CacheStatus`.
_SWAP_OUT, _SWAP_IN, _TO_STORAGE, _FROM_STORAGE = "SWAP2CPU", "SWAP2GPU", "GPU2STORAGE", "STORAGE2GPU"


@dataclass(frozen=True)
class Image:
    """A picture in a prompt: the place it takes and what is in it."""

    offset: int
    length: int
    content: int


@dataclass
class Options:
    """Configuration of the node under test.

    Attributes:
        block_size: Tokens per block.
        blocks: GPU blocks of the pool.
        slots: Requests that can be held at a time.
        budget: Tokens that one step may schedule.
        reserve: Blocks preallocated beyond the prompt.
        cpu_blocks: Host blocks for swapped-out nodes.
        storage: Name of a storage backend.
        caching: Whether the prefix cache is on.
        whole_images: Whether no chunk may begin inside an image.
        speculative: Name of a speculative method, or None.
        output_caching: Whether generated tokens enter the prefix cache.
        multimodal: Whether the model takes images.
        role: Role of the node.
    """

    block_size: int = 4
    blocks: int = 96
    slots: int = 8
    budget: int = 128
    reserve: int = 1
    cpu_blocks: int = 0
    storage: str | None = None
    caching: bool = True
    whole_images: bool = False
    speculative: str | None = None
    output_caching: bool = False
    multimodal: bool = False
    role: str = "prefill"


def config_of(options: Options) -> Any:
    """The part of an FDConfig that resource and cache managers read."""
    port = 20_000 + (os.getpid() * 131 + next(_SERIAL)) % 40_000
    cache = SimpleNamespace(
        block_size=options.block_size,
        total_block_num=options.blocks,
        prefill_kvcache_block_num=options.blocks,
        num_cpu_blocks=options.cpu_blocks,
        enable_hierarchical_cache=options.cpu_blocks > 0,
        enable_prefix_caching=options.caching,
        enable_output_caching=options.output_caching,
        kvcache_storage_backend=options.storage,
        write_policy="write_through",
        bytes_per_token_per_layer=1,
        bytes_per_layer_per_block=1,
        enc_dec_block_num=options.reserve,
        dec_token_num=options.reserve * options.block_size,
        max_block_num_per_seq=options.blocks,
        max_encoder_cache=0,
        max_processor_cache=0,
        disable_chunked_mm_input=options.whole_images,
        prealloc_dec_block_slot_num_threshold=0,
    )
    return SimpleNamespace(
        cache_config=cache,
        model_config=SimpleNamespace(enable_mm=options.multimodal, architectures=["x"], max_model_len=10**6),
        enable_mm_runtime=options.multimodal,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, local_engine_worker_queue_port=port, engine_worker_queue_port=[port]
        ),
        scheduler_config=SimpleNamespace(
            splitwise_role=options.role, max_num_batched_tokens=options.budget, max_num_seqs=options.slots
        ),
        speculative_config=SimpleNamespace(method=options.speculative, num_speculative_tokens=1),
        graph_opt_config=SimpleNamespace(),
        routing_replay_config=None,
    )


@dataclass
class Entry:
    """A request of the test and where it stands."""

    request: Any
    labels: list[int]
    state: str = "preallocated"
    hit: int = 0


@dataclass
class PNode:
    """A prefill node: its managers, its requests, its worker."""

    tree: Any
    options: Options = field(default_factory=Options)
    prompt_tokens: int = 0
    hit_tokens: int = 0

    def __post_init__(self) -> None:
        self.config = config_of(self.options)
        self.manager = self.tree.ResourceManagerV1(
            max_num_seqs=self.options.slots,
            config=self.config,
            tensor_parallel_size=1,
            splitwise_role=self.options.role,
        )
        self.cache = self.manager.cache_manager
        self.cache.prefix_tree_status_signal = SimpleNamespace(value=[0])
        self.cache.cache_task_queue = SimpleNamespace(put_transfer_task=self._transfer)
        self.oracle = KVOracle(self.options.block_size)
        self.entries: dict[str, Entry] = {}
        self.chunks: list[Chunk] = []

    # -- what the engine does ------------------------------------------------------------------------------------

    def preallocate(
        self, name: str, prompt: list[int], images: tuple[Image, ...] = (), labels: list[int] | None = None
    ) -> bool:
        """Looks up, allocates and (in the right tree) publishes; False if the node is full.

        `labels` are what the oracle knows the prompt by, where the caller has something cheaper than `labels_of`.
        """
        request = self.tree.request(name, list(prompt), self.tree.images(images))
        content = list(prompt)
        for image in images:
            for position in range(image.offset, image.offset + image.length):
                content[position] = hash((prompt[position], image.content))
        if not self.manager.preallocate_resource_in_p(request):
            return False
        labels = labels_of(content) if labels is None else labels
        self.entries[name] = Entry(request=request, labels=labels, hit=request.num_cached_tokens)
        self.prompt_tokens += len(prompt)
        self.hit_tokens += request.num_cached_tokens
        return True

    def refuse(self, name: str) -> None:
        """The decode node has no room, or the request is aborted before or after it was scheduled."""
        entry = self.entries.pop(name)
        if entry.request in self.manager.running:
            self.manager.running.remove(entry.request)
        if hasattr(self.manager, "pre_recycle_resource"):
            self.manager.pre_recycle_resource(name)
        else:
            self.manager.prerelease_resource(entry.request)

    def accept(self, name: str) -> None:
        """The decode node has room: the request may be scheduled."""
        self.entries[name].state = "running"
        self.manager.add_request_in_p([self.entries[name].request])

    def step(self) -> list[Chunk]:
        """One call of `schedule()` and the batch that comes of it."""
        scheduled = self.manager.schedule()
        # Up to 2.3 the requests alone, then also those in error, lately a batch object.
        batch = scheduled[0] if isinstance(scheduled, tuple) else scheduled
        chunks = []
        for task in batch:
            entry = self.entries.get(task.request_id)
            if entry is None or task is not entry.request:
                continue
            chunk = Chunk(
                name=task.request_id,
                table=tuple(task.block_tables),
                labels=entry.labels,
                start=task.prefill_start_index,
                end=task.prefill_end_index,
                need=task.need_prefill_tokens,
            )
            chunks.append(chunk)
            entry.state = "prefilled" if chunk.end >= chunk.need else "running"
        self.oracle.step(chunks)
        for chunk in chunks:
            if chunk.end >= chunk.need and not self.oracle.poisoned:
                assert self.oracle.holds(chunk.table, chunk.labels, chunk.need), f"{chunk.name} sends wrong KV"
        self.chunks.extend(chunks)
        return chunks

    def finish(self, name: str) -> None:
        """The first token is sampled and the blocks have reached the decode node."""
        del self.entries[name]
        self.manager.finish_requests(name)

    def preempt_all(self) -> list[str]:
        """Preempts every running request, as for a weight update; returns their ids."""
        running = [request.request_id for request in self.manager.running]
        if hasattr(self.manager, "preempted_all"):
            self.manager.preempted_all()
        elif running:
            # Up to 2.4 there is only preemption for want of blocks: one after the other until there are enough.
            enough = self.cache.can_allocate_gpu_blocks
            self.cache.can_allocate_gpu_blocks = lambda _: False
            with self.manager.lock:
                self.manager._trigger_preempt(self.manager.running[0], 1, [], [])
            self.cache.can_allocate_gpu_blocks = enough
        for name in running:
            self.entries[name].state = "preempted"
        return running

    def reschedule(self, name: str) -> None:
        """A preempted request enters the waiting queue."""
        self.entries[name].state = "waiting"
        self.manager.reschedule_preempt_task(name)

    def drain(self) -> None:
        """Ends every request that is still there, one way or the other."""
        for name in list(self.entries):
            entry = self.entries[name]
            if entry.state in ("running", "prefilled", "preempted"):
                self.finish(name)
            elif entry.state == "waiting":
                self.manager.waiting.remove(entry.request)
                del self.entries[name]
                del self.manager.requests[name]
                self.manager.stop_flags[entry.request.idx] = True
                self.manager.tasks_list[entry.request.idx] = None
            else:
                self.refuse(name)

    # -- what must hold ------------------------------------------------------------------------------------------

    def held(self) -> list[int]:
        """Blocks of the requests that are there."""
        return [block for entry in self.entries.values() for block in entry.request.block_tables]

    def check(self) -> None:
        """No block is free twice, or free and in use."""
        free = self.cache.gpu_free_block_list
        assert len(set(free)) == len(free), "a block is in the free list twice"
        in_tree = [node.block_id for node in self.cache.node_map.values() if node.has_in_gpu]
        assert len(set(in_tree)) == len(in_tree), "two nodes own the same block"
        assert not set(free) & set(in_tree), "a block of the tree is in the free list"
        assert not set(free) & set(self.held()), "a block of a request is in the free list"

    def lost(self) -> int:
        """Blocks that are neither free nor can be made free, once every request is gone."""
        self.cache.can_allocate_gpu_blocks(self.options.blocks)
        return self.options.blocks - len(self.cache.gpu_free_block_list)

    def close(self) -> None:
        """Gives back shared memory and threads."""
        self.manager.need_block_num_signal.clear()
        for owner in (self.manager, self.cache):
            for value in vars(owner).values():
                if isinstance(value, ThreadPoolExecutor):
                    value.shutdown(wait=False)

    # -- the transfer manager ------------------------------------------------------------------------------------

    def _transfer(self, task: tuple[Any, ...]) -> None:
        if isinstance(task[0], list):
            nodes, gpu, cpu, status, task_id = task  # the order of 2.3 and 2.4
            task = (status, task_id, nodes, gpu, cpu)
        kind = task[0].name
        if kind in (_SWAP_OUT, _SWAP_IN):
            _, task_id, nodes, gpu, cpu = task
            (self.oracle.swap_out if kind == _SWAP_OUT else self.oracle.swap_in)(gpu, cpu)
            for node, gpu_block, cpu_block in zip(nodes, gpu, cpu, strict=True):
                self.cache._handle_swap_result(node, gpu_block, cpu_block, task[0])
            self.cache.task_swapping_event[task_id].set()
            return
        job = task[1]
        if kind == _TO_STORAGE:
            self.oracle.put(job.keys, job.gpu_block_ids)
            if hasattr(self.cache, "storage_write_back_result"):
                self.cache.storage_write_back_result[job.task_id] = list(job.gpu_block_ids)
            self.cache.task_write_back_event[job.task_id].set()
        else:
            filled = self.oracle.get(job.keys, job.gpu_block_ids)
            self.cache.storage_prefetch_block_ids[job.task_id] = filled
            self.cache.task_prefetch_event[job.task_id].set()
