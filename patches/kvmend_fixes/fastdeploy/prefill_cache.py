"""fastdeploy-prefill-cache: a prefill node publishes early, and nobody reads a block that was not computed."""

from __future__ import annotations

from kvmend.api import Body, Fix, Site, Wrap
from kvmend_fixes.fastdeploy import FASTDEPLOY
from kvmend_fixes.fastdeploy._prefill_node import (
    wrap_cache_output_blocks,
    wrap_get_num_new_tokens,
    wrap_get_prefix_cached_blocks,
    wrap_preallocate_resource_in_p,
    wrap_prepare_prefill_task,
    wrap_update_cache_blocks,
    wrap_write_cache_to_storage,
)
from kvmend_fixes.fastdeploy._prefill_source import (
    CACHE_MANAGER,
    NO_GUARD,
    NO_PUBLICATION,
    NODES,
    OUTPUT_CACHING,
    RESOURCE_MANAGER,
    STORAGE,
    probe,
)

WHY = """\
Symptom: on 2.3 - 2.5 the prefix cache of a prefill node misses prompts it is about to compute, and loses blocks for
good when two requests with the same prefix are scheduled; from PR 7364 on answers can be garbage, because attention
read blocks that nobody had computed.

Trigger: up to 2.5 a request's blocks enter the prefix tree when its chunks are scheduled, so requests that arrive
while others wait for the decode node find nothing, and each of them publishes the same nodes again. Later releases
publish at preallocation, before anything is computed: when the decode node refuses the request, when it is preempted
or aborted, or when a request that matched its blocks is scheduled first, the blocks are read without having been
written."""

HOW = """\
Blocks are published at preallocation, once, under the manager's lock. A node published before its block is computed
is marked open. A chunk that is scheduled covers its blocks. A request about to be scheduled whose matched blocks are
not all covered computes them itself: its computed-token count is lowered to the first open block, and what was
reported as cached is corrected. The same rule upwards: a request starts behind the leading blocks that others have
computed since. An open block is never written to a storage backend.

Safe because: a chunk only ever reads blocks that an earlier chunk wrote, or one of the same batch; the mark is on the
tree node, so eviction, swapping and reuse of block ids cannot make it wrong; no request waits for another and no node
is withdrawn, so nothing can deadlock; the blocks of a request never change, only where it starts, and the cache
messager sends by how far the prompt is computed, so every block still reaches the decode node."""

REMOVE_WHEN = "A release of FastDeploy computes matched blocks that nobody has computed; none known does."

COUNTERS = {
    "published": "blocks that entered the prefix tree at preallocation, before they were computed",
    "covered": "such blocks that a scheduled chunk computed",
    "taken_back": "hits that were taken back because nobody had computed the blocks",
    "taken_back_tokens": "tokens of these hits, computed by the request itself",
    "skipped_ahead": "times a request started behind blocks that others had computed since",
    "skipped_ahead_tokens": "tokens saved by that",
    "repeats": "second publications that were left out",
    "not_published": "publications given up because the tree had changed since the lookup",
    "kept_from_storage": "writes to a storage backend that were cut or left out because of uncovered blocks",
    "errors": "publications that failed and were undone",
}


def _manager(name: str, wrap: Wrap, *features: str, mode: str = "safe") -> Site:
    return _site(RESOURCE_MANAGER, f"ResourceManagerV1.{name}", wrap, features, mode)


def _cache(name: str, wrap: Wrap, *features: str, mode: str = "safe") -> Site:
    return _site(CACHE_MANAGER, f"PrefixCacheManager.{name}", wrap, features, mode)


def _site(module: str, qualname: str, wrap: Wrap, features: tuple[str, ...], mode: str) -> Site:
    return Site(module=module, qualname=qualname, wrap=wrap, features=frozenset(features), modes=frozenset({mode}))


FIX = Fix(
    id="fastdeploy-prefill-cache",
    switch="KVMEND_FASTDEPLOY_PREFILL_CACHE",
    framework=FASTDEPLOY,
    summary="prefill nodes find prompts that still wait for the decode node, and never serve KV nobody computed",
    why=WHY,
    how=HOW,
    remove_when=REMOVE_WHEN,
    upstream=(
        "https://github.com/PaddlePaddle/FastDeploy/pull/7364",
        "https://github.com/PaddlePaddle/FastDeploy/pull/7797",
        "https://github.com/PaddlePaddle/FastDeploy/pull/6226",
    ),
    sites=(
        _manager("preallocate_resource_in_p", wrap_preallocate_resource_in_p),
        _manager("get_prefix_cached_blocks", wrap_get_prefix_cached_blocks),
        _manager("_get_num_new_tokens", wrap_get_num_new_tokens),
        _manager("_prepare_prefill_task", wrap_prepare_prefill_task),
        _cache("update_cache_blocks", wrap_update_cache_blocks),
        _cache("cache_output_blocks", wrap_cache_output_blocks, OUTPUT_CACHING),
        _cache("write_cache_to_storage", wrap_write_cache_to_storage, STORAGE),
        # Upstream parity: what 7364 and 7797 do, where a tree lacks it.
        _manager("preallocate_resource_in_p", wrap_preallocate_resource_in_p, NO_GUARD, mode="eager"),
        _manager("get_prefix_cached_blocks", wrap_get_prefix_cached_blocks, NO_PUBLICATION, mode="eager"),
        _manager("_get_num_new_tokens", wrap_get_num_new_tokens, NO_PUBLICATION, mode="eager"),
        _cache("update_cache_blocks", wrap_update_cache_blocks, NO_GUARD, mode="eager"),
    ),
    bodies=(
        Body(module=RESOURCE_MANAGER, qualname="ResourceManagerV1.schedule"),
        Body(module=RESOURCE_MANAGER, qualname="ResourceManagerV1._free_blocks"),
        Body(module=CACHE_MANAGER, qualname="PrefixCacheManager.request_match_blocks"),
        Body(module=CACHE_MANAGER, qualname="PrefixCacheManager.mm_match_block"),
        Body(module=CACHE_MANAGER, qualname="PrefixCacheManager.mm_build_path"),
        Body(module=CACHE_MANAGER, qualname="PrefixCacheManager.release_block_ids"),
        Body(module=NODES, qualname="BlockNode"),
    ),
    probe=probe,
    counters=COUNTERS,
    modes=("safe", "eager"),
    fingerprints="kvmend_fixes.fingerprints:fastdeploy-prefill-cache.json",
    proof="kvmend_fixes.proofs.fastdeploy_prefill_cache",
    releases="2.3 – 2.6 and develop until 2026-05-18 at least",
)
