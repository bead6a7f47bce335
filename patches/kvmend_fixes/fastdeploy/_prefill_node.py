"""The wrappers of fastdeploy-prefill-cache: what a prefill node does differently, step by step.

Everything here runs under the resource manager's lock, except the write to a storage backend, which reads the path of
a request that is not scheduled any more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kvmend.api import Context
from kvmend_fixes.fastdeploy._frontier import agreeing, cover, covered_end, first_open, publish
from kvmend_fixes.fastdeploy._prefill_source import NO_PUBLICATION
from kvmend_fixes.fastdeploy._reports import move_start, repaying

_STATE = "kvmend_prefill_cache"
_Method = Callable[..., Any]


class _State:
    """What is remembered of one cache manager; made when its node preallocates its first request.

    Attributes:
        block_size: Tokens per block.
        publications: How often the tree grew.
        matched: Id of the request that was looked up last and `publications` then.
        agreed: By id of a request that was looked up and not scheduled yet, its block table and how many of the nodes
            found are known to hold the blocks in it.
        chunk: The running request whose next chunk is being planned; None for one from the waiting queue.
        debts: Tokens counted too much so far, by Prometheus counter.
        complained: Whether a failure was logged.
    """

    __slots__ = ("agreed", "block_size", "chunk", "complained", "debts", "matched", "publications")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.publications = 0
        self.matched: tuple[str, int] | None = None
        self.agreed: dict[str, tuple[Any, int]] = {}
        self.chunk: Any = None
        self.debts: dict[str, int] = {}
        self.complained = False


def _state_of(cache_manager: Any) -> _State | None:
    """The state of a cache manager, or None where it is none of ours: decode and mixed roles never get one."""
    # Not getattr: a manager that makes up its attributes, as mocks and proxies do, has no state either.
    state: _State | None = cache_manager.__dict__.get(_STATE)
    return state


def wrap_preallocate_resource_in_p(original: _Method, context: Context) -> _Method:
    publishes = NO_PUBLICATION not in context.features

    @functools.wraps(original)
    def preallocate_resource_in_p(self: Any, request: Any) -> Any:
        config = self.config
        prefill = config.scheduler_config.splitwise_role == "prefill" and config.cache_config.enable_prefix_caching
        if not prefill or getattr(self, "enable_cache_manager_v1", False):
            return original(self, request)
        state = _state_of(self.cache_manager)
        if state is None:
            state = _State(config.cache_config.block_size)
            setattr(self.cache_manager, _STATE, state)
        done = original(self, request)
        if not done or publishes:
            return done
        with self.lock:
            if self.requests.get(request.request_id) is not request or not request.block_tables:
                return done
            # Somebody may have published the same nodes since the lookup; ours would take their place and lose them.
            if state.matched != (request.request_id, state.publications):
                context.counters.not_published += 1
                return done
            state.chunk = None
            self.cache_manager.update_cache_blocks(request, state.block_size, request.need_prefill_tokens)
        return done

    return preallocate_resource_in_p


def wrap_get_prefix_cached_blocks(original: _Method, context: Context) -> _Method:
    safe = context.mode == "safe"

    @functools.wraps(original)
    def get_prefix_cached_blocks(self: Any, request: Any) -> Any:
        state = _state_of(self.cache_manager)
        if state is None:
            return original(self, request)
        state.matched = (request.request_id, state.publications)
        if any(state.debts.values()):
            with repaying(state.debts):
                found = original(self, request)
        else:
            found = original(self, request)
        if safe and found:
            _remember(self.cache_manager, request, state.agreed)
        return found

    return get_prefix_cached_blocks


def _remember(cache_manager: Any, request: Any, agreed: dict[str, tuple[Any, int]]) -> None:
    """Compares the nodes found with the request's block table while both are at hand, so that scheduling need not.

    A request's table is only ever appended to. The block of a node changes when it is swapped, so nothing is remembered
    where there are host blocks.
    """
    leaves = cache_manager.req_leaf_map
    leaf = leaves.get(request.request_id)
    if leaf is None or getattr(cache_manager, "num_cpu_blocks", True):
        agreed.pop(request.request_id, None)
        return
    if len(agreed) >= len(leaves):
        for name in [name for name in agreed if name not in leaves]:
            del agreed[name]  # released without having been scheduled
    table = request.block_tables
    agreed[request.request_id] = table, agreeing(leaf, table)


def wrap_get_num_new_tokens(original: _Method, context: Context) -> _Method:
    safe, counters = context.mode == "safe", context.counters

    @functools.wraps(original)
    def get_num_new_tokens(self: Any, request: Any, token_budget: Any) -> Any:
        state = self.cache_manager.__dict__.get(_STATE)  # as _state_of, which would be a call more per chunk
        if state is None:
            return original(self, request, token_budget)
        before = request.num_computed_tokens
        # `schedule()` looks at running requests first and at the head of the waiting queue afterwards.
        if self.waiting and self.waiting[0] is request:
            state.chunk = None
        else:
            state.chunk = request
            # One that goes on where its last chunk ended has computed all that lies before.
            if before and before == request.prefill_end_index:
                return original(self, request, token_budget)
        if safe:
            start = _start_of(self, request, state)
            if start != before:
                move_start(self, request, start, state.debts)
                if start < before:
                    counters.taken_back += 1
                    counters.taken_back_tokens += before - start
                else:
                    counters.skipped_ahead += 1
                    counters.skipped_ahead_tokens += start - before
        return original(self, request, token_budget)

    return get_num_new_tokens


def _start_of(manager: Any, request: Any, state: _State) -> int:
    """Where a request about to be scheduled has to start: the first token that it must compute itself."""
    computed: int = request.num_computed_tokens
    leaf = manager.cache_manager.req_leaf_map.get(request.request_id)
    if leaf is None:
        # The tree was reset since the lookup: nothing is known of the matched blocks any more.
        return computed if request.prefill_end_index > 0 else 0
    block_size, table = state.block_size, request.block_tables
    agreed = state.agreed.pop(request.request_id, None)
    first = first_open(leaf, table, agreed[1] if agreed is not None and agreed[0] is table else 0)
    start = first * block_size
    if start == computed:
        return computed
    if start < computed:
        if first == leaf.depth:
            return computed  # all its nodes are covered; the rest of the hit was fetched and is not in the tree yet
    else:
        if request.prefill_end_index > 0:
            return computed  # a worker takes up a prompt where the last chunk ended
        # As after a full match: the last block is computed again, for there must be something to sample from.
        start = min(start, (request.need_prefill_tokens - 1) // block_size * block_size)
    config = manager.config.cache_config
    if getattr(config, "disable_chunked_mm_input", False) and hasattr(manager, "revert_chunked_mm_input"):
        start = manager.revert_chunked_mm_input(request.multimodal_inputs, start)
    return start if first * block_size < computed else max(start, computed)


def wrap_prepare_prefill_task(original: _Method, context: Context) -> _Method:
    counters = context.counters

    @functools.wraps(original)
    def prepare_prefill_task(self: Any, request: Any, new_token_num: Any) -> Any:
        task = original(self, request, new_token_num)
        cache_manager = self.cache_manager
        state = cache_manager.__dict__.get(_STATE)  # as above
        if state is not None:
            try:
                leaf = cache_manager.req_leaf_map[request.request_id]
            except KeyError:
                return task  # the tree was reset since the lookup
            start, block_size = request.num_computed_tokens, state.block_size
            counters.covered += cover(leaf, start // block_size, (start + new_token_num) // block_size)
        return task

    return prepare_prefill_task


def wrap_update_cache_blocks(original: _Method, context: Context) -> _Method:
    safe, counters = context.mode == "safe", context.counters
    once = NO_PUBLICATION in context.features
    place, cached_blocks = str(context.facts["place"]), str(context.facts["cached_blocks"])

    @functools.wraps(original)
    def update_cache_blocks(self: Any, task: Any, block_size: Any, num_computed_tokens: Any) -> Any:
        state = _state_of(self)
        if state is None:
            return original(self, task, block_size, num_computed_tokens)
        name = task.request_id
        if once and state.chunk is task:
            counters.repeats += 1
            return None
        known = getattr(self, place).get(name)
        if known is None:
            return original(self, task, block_size, num_computed_tokens)
        last_node, cached = known
        matched: int = getattr(task, cached_blocks)
        # Blocks fetched from storage enter the tree here or never, even if the request starts before them.
        upto = max(num_computed_tokens, matched * block_size)
        if upto - upto % block_size <= cached:
            counters.repeats += 1
            return None
        children = len(last_node.children)
        try:
            result = original(self, task, block_size, upto)
        except Exception as error:
            _undo(self, task, known, matched, children, place, cached_blocks)
            counters.errors += 1
            if not state.complained:
                state.complained = True
                context.log.warning(
                    "fastdeploy-prefill-cache: request %s is not in the prefix cache, its publication failed: %s: %s",
                    name, type(error).__name__, error,
                )  # fmt: skip
            return None
        leaf = self.req_leaf_map.get(name)
        if leaf is not None and leaf is not last_node:
            state.publications += 1
            if safe:
                done = max(task.num_computed_tokens // block_size, matched)
                counters.published += publish(leaf, last_node, done)
        return result

    return update_cache_blocks


def _undo(manager: Any, task: Any, known: Any, matched: int, children: int, place: str, cached_blocks: str) -> None:
    """Takes a half-made publication out of the tree again; the blocks stay the request's own."""
    last_node, name = known[0], task.request_id
    if getattr(manager, place).get(name) is not known:
        return  # the tree was reset meanwhile, or the publication was complete
    if len(last_node.children) > children:
        node = last_node.children.pop(next(reversed(last_node.children)))
        while node is not None:
            manager.node_map.pop(node.node_id, None)
            manager.node_id_pool.append(node.node_id)
            node = next(iter(node.children.values()), None)
    manager.req_leaf_map[name] = last_node
    manager.leaf_req_map[last_node].add(name)
    setattr(task, cached_blocks, matched)


def wrap_cache_output_blocks(original: _Method, context: Context) -> _Method:
    place, cached_blocks = str(context.facts["place"]), str(context.facts["cached_blocks"])

    @functools.wraps(original)
    def cache_output_blocks(self: Any, task: Any, block_size: Any) -> Any:
        state = _state_of(self)
        known = getattr(self, place).get(task.request_id) if state is not None else None
        matched = getattr(task, cached_blocks, 0)
        result = original(self, task, block_size)
        if state is not None and known is not None:
            # A prefill node samples one token and never computes it; a block that ends with it stays open.
            state.publications += 1
            leaf = self.req_leaf_map[task.request_id]
            publish(leaf, known[0], max(task.num_computed_tokens // block_size, matched))
        return result

    return cache_output_blocks


def wrap_write_cache_to_storage(original: _Method, context: Context) -> _Method:
    @functools.wraps(original)
    def write_cache_to_storage(self: Any, request: Any) -> Any:
        if self.kvcache_storage_backend is None or _state_of(self) is None:
            return original(self, request)
        leaf = self.req_leaf_map.get(request.request_id)
        end = covered_end(leaf) if leaf is not None else None
        if end is leaf or end is None:
            return original(self, request)
        context.counters.kept_from_storage += 1
        # An attention store indexes the prompt's tokens, however few blocks are written with them.
        if end.parent is None or self.kvcache_storage_backend == "attention_store":
            return None
        self.req_leaf_map[request.request_id] = end
        try:
            return original(self, request)
        finally:
            if self.req_leaf_map.get(request.request_id) is end:
                self.req_leaf_map[request.request_id] = leaf

    return write_cache_to_storage
