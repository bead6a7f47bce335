"""Prefix tree and block pool of the double."""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from threading import Event, Lock
from types import SimpleNamespace
from typing import Any

from fastdeploy.cache_manager.cache_data import BlockNode, CacheStatus
from fastdeploy.metrics.metrics import main_process_metrics


class CacheMetrics:
    """Running totals of one node."""

    def __init__(self) -> None:
        self.req_count = self.hit_req_count = 0
        self.matched_token_num = self.total_token_num = 0
        self.total_gpu_matched_token_num = 0
        self.total_cpu_matched_token_num = 0
        self.total_storage_matched_token_num = 0

    def add(self, asked: int, gpu: int, cpu: int, storage: int) -> None:
        self.req_count += 1
        self.hit_req_count += gpu + cpu + storage > 0
        self.total_token_num += asked
        self.matched_token_num += gpu + cpu + storage
        self.total_gpu_matched_token_num += gpu
        self.total_cpu_matched_token_num += cpu
        self.total_storage_matched_token_num += storage
        self._update_history_hit_metrics()

    def _update_history_hit_metrics(self) -> None:
        main_process_metrics.hit_token_rate.set(self.matched_token_num / self.total_token_num)


class PrefixCacheManager:
    """Owns the blocks of a node and knows which prompts they hold."""

    def __init__(self, config: Any, splitwise_role: str) -> None:
        self.config = config
        self.splitwise_role = splitwise_role
        self.num_gpu_blocks: int = config.cache_config.total_block_num
        self.num_cpu_blocks: int = config.cache_config.num_cpu_blocks
        self.kvcache_storage_backend = config.cache_config.kvcache_storage_backend
        self.metrics = CacheMetrics()
        self.request_release_lock = Lock()
        self.prefix_tree_status_signal: Any = None
        self.cache_task_queue: Any = None
        self.task_swapping_event: dict[str, Event] = {}
        self.task_write_back_event: dict[str, Event] = {}
        self.task_prefetch_event: dict[str, Event] = {}
        self.storage_prefetch_block_ids: dict[str, list[int]] = {}
        self._clock = itertools.count(1)
        self.reset()

    def reset(self) -> None:
        """Forgets the whole tree."""
        self.gpu_free_block_list = list(range(self.num_gpu_blocks))
        self.cpu_free_block_list = list(range(self.num_cpu_blocks))
        self.node_id_pool = [*range(self.num_cpu_blocks + self.num_gpu_blocks)]
        self.node_map: dict[int, BlockNode] = {}
        self.radix_tree_root = BlockNode(-1, None, -1, None)
        self.req_leaf_map: dict[str, BlockNode] = {}
        self.leaf_req_map: dict[BlockNode, set[str]] = defaultdict(set)
        self.req_to_radix_tree_info: dict[str, list[Any]] = {}

    # -- the pool

    def can_allocate_gpu_blocks(self, num_blocks: int) -> bool:
        free = self.gpu_free_block_list
        if num_blocks > len(free):
            self._evict(num_blocks)
        return num_blocks <= len(free)

    def allocate_gpu_blocks(self, num_blocks: int, req_id: str = "") -> list[int]:
        assert num_blocks <= len(self.gpu_free_block_list), f"{req_id} wants {num_blocks} blocks"
        return [self.gpu_free_block_list.pop(0) for _ in range(num_blocks)]

    def recycle_gpu_blocks(self, gpu_block_ids: list[int], req_id: str = "") -> None:
        self.gpu_free_block_list.extend(gpu_block_ids)
        self.gpu_free_block_list.sort()

    def get_required_block_num(self, input_token_num: int, block_size: int) -> int:
        return -(-input_token_num // block_size)

    def _evict(self, wanted: int) -> None:
        """Least recently used first, from the leaves up; to host memory while there is room."""
        while len(self.gpu_free_block_list) < wanted:
            found = [node for node in self._reachable() if node.evictable()]
            if not found:
                return
            node = min(found, key=lambda node: (node.last_used, -node.depth))
            if self.num_cpu_blocks and (self.cpu_free_block_list or self._drop_from_cpu()):
                node.cache_status = CacheStatus.SWAP2CPU
                self._swap(CacheStatus.SWAP2CPU, [node], [node.block_id], [self.cpu_free_block_list.pop(0)])
            elif node.children:
                return
            else:
                self.recycle_gpu_blocks([node.block_id])
                self._remove(node)

    def _drop_from_cpu(self) -> bool:
        found = [
            node
            for node in self._reachable()
            if node.cache_status is CacheStatus.CPU and not node.children and node.shared_count == 0
        ]
        if found:
            node = min(found, key=lambda node: node.last_used)
            self.cpu_free_block_list.append(node.block_id)
            self._remove(node)
        return bool(found)

    def _reachable(self) -> list[BlockNode]:
        """Nodes that are in the tree: one whose place another has taken is not, and its block is lost."""
        found, pending = [], list(self.radix_tree_root.children.values())
        while pending:
            found.append(pending.pop())
            pending.extend(found[-1].children.values())
        return found

    def _remove(self, node: BlockNode) -> None:
        assert node.parent is not None
        assert node.hash_value is not None
        node.parent.children.pop(node.hash_value, None)
        self.node_map.pop(node.node_id, None)
        self.node_id_pool.append(node.node_id)

    def _swap(self, kind: CacheStatus, nodes: list[BlockNode], gpu: list[int], cpu: list[int]) -> None:
        task = f"swap {next(self._clock)}"
        self.task_swapping_event[task] = Event()
        self.cache_task_queue.put_transfer_task((kind, task, [node.node_id for node in nodes], gpu, cpu))
        self.task_swapping_event.pop(task).wait()

    def _handle_swap_result(self, node_id: int, gpu_block: int, cpu_block: int, kind: CacheStatus) -> None:
        node = self.node_map[node_id]
        if kind is CacheStatus.SWAP2CPU:
            node.cache_status, node.block_id = CacheStatus.CPU, cpu_block
            self.recycle_gpu_blocks([gpu_block])
        else:
            node.cache_status, node.block_id = CacheStatus.GPU, gpu_block
            self.cpu_free_block_list.append(cpu_block)

    # -- the tree

    def _tokens(self, task: Any) -> list[int]:
        return [*task.prompt_token_ids, *task.output_token_ids]

    def get_block_hash_extra_keys(
        self, request: Any, start_idx: int, end_idx: int, mm_idx: int
    ) -> tuple[int, list[str]]:
        """Hashes of the images that have a part in the tokens [start_idx, end_idx)."""
        inputs = request.multimodal_inputs or {}
        keys = [
            key
            for place, key in zip(inputs.get("mm_positions", ()), inputs.get("mm_hashes", ()), strict=True)
            if place.offset < end_idx and place.offset + place.length > start_idx
        ]
        return mm_idx, keys

    def _key(self, task: Any, node: BlockNode, block_size: int) -> str | None:
        """Key of the block that follows a node in a request's prompt; None if it is not whole."""
        start = node.depth * block_size
        tokens = self._tokens(task)[start : start + block_size]
        if len(tokens) < block_size:
            return None
        _, images = self.get_block_hash_extra_keys(request=task, start_idx=start, end_idx=start + block_size, mm_idx=0)
        return hashlib.md5(repr((node.hash_value, tokens, images)).encode()).hexdigest()

    def _path(self, leaf: BlockNode) -> list[BlockNode]:
        path = []
        while leaf is not self.radix_tree_root:
            path.append(leaf)
            assert leaf.parent is not None
            leaf = leaf.parent
        return path[::-1]

    def mm_match_block(self, request: Any, block_size: int) -> BlockNode:
        """The deepest node whose path is the beginning of the request."""
        node = self.radix_tree_root
        while (key := self._key(request, node, block_size)) in node.children:
            assert key is not None
            node = node.children[key]
        return node

    def request_match_blocks(self, task: Any, block_size: int) -> tuple[list[int], int, dict[str, int]]:
        """Blocks of the longest known beginning of a request, which it holds from now on."""
        with self.request_release_lock:
            leaf = self.mm_match_block(task, block_size)
            path = self._path(leaf)
            for node in path:
                node.shared_count += 1
                node.last_used = next(self._clock)
            away = [node for node in path if node.cache_status is CacheStatus.CPU]
            if away:
                assert self.can_allocate_gpu_blocks(len(away))
                target = self.allocate_gpu_blocks(len(away), task.request_id)
                self._swap(CacheStatus.SWAP2GPU, away, target, [node.block_id for node in away])
            stored = self._fetch(task, leaf, block_size)
            blocks = [node.block_id for node in path] + stored
            found = {
                "gpu_match_token_num": (len(path) - len(away)) * block_size,
                "cpu_match_token_num": len(away) * block_size,
                "storage_match_token_num": len(stored) * block_size,
            }
            self.metrics.add(task.num_total_tokens, *found.values())
            self.req_leaf_map[task.request_id] = leaf
            self.leaf_req_map[leaf].add(task.request_id)
            self.req_to_radix_tree_info[task.request_id] = [leaf, len(path) * block_size]
            task.num_cached_blocks = len(blocks)
            return blocks, len(blocks) * block_size, found

    def _fetch(self, task: Any, leaf: BlockNode, block_size: int) -> list[int]:
        """Blocks read from the storage backend, to follow the node."""
        keys, node = [], leaf
        while self.kvcache_storage_backend and (key := self._key(task, node, block_size)) is not None:
            keys.append(key)
            node = BlockNode(-1, key, -1, node)
        if not keys or not self.can_allocate_gpu_blocks(len(keys)):
            return []
        blocks = self.allocate_gpu_blocks(len(keys), task.request_id)
        self.task_prefetch_event[task.request_id] = Event()
        job = SimpleNamespace(task_id=task.request_id, keys=keys, gpu_block_ids=blocks)
        self.cache_task_queue.put_transfer_task((CacheStatus.STORAGE2GPU, job))
        self.task_prefetch_event.pop(task.request_id).wait()
        filled = self.storage_prefetch_block_ids.pop(task.request_id)
        self.recycle_gpu_blocks(blocks[len(filled) :])
        return filled

    def update_cache_blocks(self, task: Any, block_size: int, num_computed_tokens: int) -> None:
        """Publishes the blocks of a request's first `num_computed_tokens` tokens."""
        name = task.request_id
        last_node, cached = self.req_to_radix_tree_info[name]
        whole = num_computed_tokens - num_computed_tokens % block_size
        # early: if whole <= cached: return
        self.leaf_req_map[last_node].discard(name)
        with self.request_release_lock:
            leaf = self.mm_build_path(task, num_computed_tokens, block_size, last_node, cached)
            self.req_leaf_map[name] = leaf
            self.leaf_req_map[leaf].add(name)
            self.req_to_radix_tree_info[name] = [leaf, whole]
            task.num_cached_blocks = whole // block_size

    def mm_build_path(
        self, request: Any, num_computed_tokens: int, block_size: int, last_node: BlockNode, num_cached_tokens: int
    ) -> BlockNode:
        """New nodes for the blocks of a request that follow its last node, as far as it is computed."""
        node = last_node
        while (node.depth + 1) * block_size <= num_computed_tokens:
            key = self._key(request, node, block_size)
            assert key is not None
            child = BlockNode(self.node_id_pool.pop(), key, request.block_tables[node.depth], node)
            child.shared_count = 1
            child.last_used = next(self._clock)
            self.node_map[child.node_id] = child
            node.children[key] = child
            node = child
        return node

    def cache_output_blocks(self, task: Any, block_size: int) -> None:
        """Publishes what a request has generated, too."""
        name, tokens = task.request_id, task.num_total_tokens
        with self.request_release_lock:
            last_node, cached = self.req_to_radix_tree_info[name]
            self.leaf_req_map[last_node].discard(name)
            leaf = self.mm_build_path(task, tokens, block_size, last_node, cached)
            self.req_leaf_map[name] = leaf
            self.leaf_req_map[leaf].add(name)
            self.req_to_radix_tree_info[name] = [leaf, leaf.depth * block_size]
            task.num_cached_blocks = leaf.depth

    def release_block_ids(self, task: Any) -> None:
        """The request holds its nodes no longer."""
        with self.request_release_lock:
            leaf = self.req_leaf_map.pop(task.request_id)
            self.leaf_req_map[leaf].remove(task.request_id)
            for node in self._path(leaf):
                node.shared_count -= 1
            self.req_to_radix_tree_info.pop(task.request_id, None)

    def write_cache_to_storage(self, request: Any) -> None:
        """Writes the blocks of a request to the storage backend."""
        if self.kvcache_storage_backend is None:
            return
        keys = [node.hash_value for node in self._path(self.req_leaf_map[request.request_id])]
        if not keys:
            return
        self.task_write_back_event[request.request_id] = Event()
        job = SimpleNamespace(task_id=request.request_id, keys=keys, gpu_block_ids=request.block_tables[: len(keys)])
        self.cache_task_queue.put_transfer_task((CacheStatus.GPU2STORAGE, job))
        self.task_write_back_event.pop(request.request_id).wait()
