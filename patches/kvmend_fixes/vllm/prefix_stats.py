"""vllm-prefix-stats: a request's prefix-cache lookup is counted once, when the request is admitted."""

from __future__ import annotations

import ast

from kvmend.api import AFFECTED, FIXED, UNKNOWN, Body, BodySource, Finding, Fix, Site, Sources
from kvmend_fixes.vllm import VLLM
from kvmend_fixes.vllm._lookup_holds import (
    IN_PLACE,
    INLINE,
    drop_inline_lookup,
    hold_inline_lookup,
    hold_lookup,
    meet_manager,
    settle_admission,
)
from kvmend_fixes.vllm._scheduler_source import MANAGER, SCHEDULER, counting_bodies

WHY = """\
Symptom: `vllm:prefix_cache_queries` and `vllm:prefix_cache_hits` grow by more tokens than were sent, and the hit rate
that dashboards and autoscalers see is wrong, the more so the busier the server is.

Trigger: `KVCacheManager.get_computed_blocks` counts the lookup before the request is admitted. A request that is then
not admitted (no free KV blocks, a KV connector that answers "not yet", any other early exit of the scheduling loop)
stays in the waiting queue, is looked up again at the next step, and is counted again. A request that waits for a
thousand steps counts a thousand times."""

HOW = """\
What the original counts during a lookup is held back: while it runs, a stand-in takes the place of the manager's
statistics object and keeps what was counted, three numbers and the request's id. When the request is then admitted
(`allocate_slots` returns blocks and the request had none computed) they are settled into the statistics, once, by the
original's own counters. The newest lookup of the request counts, and a failed admission drops it; the last 31 lookups
that no admission followed at once are remembered, so that probes in between do not matter. On 0.24 - 0.26 `schedule()`
itself looks up and counts for hybrid (Mamba) models with a connector; there the counters are noted after the lookup and
put back unless the same request is admitted.

Safe because: what is scheduled does not depend on these counters; return values pass through untouched whatever their
number; the statistics object that others hold stays the same object between two `make_prefix_cache_stats` calls;
nothing refers to a request; nothing is copied from vLLM, so a scheduler of one's
own is counted as well."""

REMOVE_WHEN = "The server runs vLLM 0.27.0 or later, which counts at admission itself; kvmend then says already_fixed."

_COORDINATOR = "vllm.v1.core.kv_cache_coordinator"
_STATS = "vllm.v1.metrics.stats"


def probe(sources: Sources) -> Finding:
    """Reads from the source when lookups are counted.

    Affected: the lookup counts. Fixed: it does not, and `schedule()` calls `record_prefix_cache_stats`.
    """
    bodies = counting_bodies(sources)
    if isinstance(bodies, Finding):
        return bodies
    lookup, _, schedule = bodies
    features = set()
    if _increments(lookup):
        features.add(IN_PLACE)
    elif not _calls(lookup, "record"):
        if _calls(schedule, "record_prefix_cache_stats"):
            return Finding(state=FIXED, reason="schedule() records lookups at admission itself")
        return Finding(state=UNKNOWN, reason="neither the lookup nor schedule() counts lookups in a known way")
    if _calls(schedule, "record_prefix_cache_stats"):
        return Finding(state=UNKNOWN, reason="lookups are counted both at the lookup and at admission")
    if _calls(schedule, "find_longest_cache_hit_per_group"):
        features.add(INLINE)
    how = "increments the counters" if IN_PLACE in features else "records"
    where = " and schedule() does so inline for hybrid models with a connector" if INLINE in features else ""
    return Finding(state=AFFECTED, reason=f"the lookup {how} before admission{where}", features=frozenset(features))


def _calls(source: BodySource, method: str) -> bool:
    # Most are answered by the text: `schedule()` has thousands of nodes, and every process asks.
    return method in source.text and any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method
        for node in ast.walk(source.tree)
    )


def _increments(source: BodySource) -> bool:
    return "queries" in source.text and any(
        isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute) and node.target.attr == "queries"
        for node in ast.walk(source.tree)
    )


FIX = Fix(
    id="vllm-prefix-stats",
    switch="KVMEND_VLLM_PREFIX_STATS",
    framework=VLLM,
    summary="Prefix-cache lookups are counted once per admission, not at every scheduling retry.",
    why=WHY,
    how=HOW,
    remove_when=REMOVE_WHEN,
    upstream=(
        "https://github.com/vllm-project/vllm/pull/48860",
        "https://github.com/vllm-project/vllm/issues/43736",
        "https://github.com/vllm-project/vllm/issues/49829",
    ),
    releases="0.8.5 – 0.26.0",
    sites=(
        Site(module=MANAGER, qualname="KVCacheManager.get_computed_blocks", wrap=hold_lookup),
        Site(module=MANAGER, qualname="KVCacheManager.allocate_slots", wrap=settle_admission),
        Site(module=MANAGER, qualname="KVCacheManager.__init__", wrap=meet_manager),
        Site(
            module=MANAGER,
            qualname="KVCacheManager.make_prefix_cache_stats",
            wrap=drop_inline_lookup,
            features=frozenset({INLINE}),
        ),
        Site(
            module=_COORDINATOR,
            qualname="HybridKVCacheCoordinator.find_longest_cache_hit_per_group",
            wrap=hold_inline_lookup,
            features=frozenset({INLINE}),
        ),
    ),
    bodies=(
        Body(module=MANAGER, qualname="KVCacheManager.record_prefix_cache_stats"),
        Body(module=MANAGER, qualname="KVCacheManager.reset_prefix_cache"),
        Body(module=SCHEDULER, qualname="Scheduler.schedule"),
        Body(module=_STATS, qualname="PrefixCacheStats"),
    ),
    probe=probe,
    counters={
        "held": "lookups held back",
        "settled": "lookups counted at admission",
        "dropped": "lookups that led to no admission",
    },
    may_fall=("dropped",),
    fingerprints="kvmend_fixes.fingerprints:vllm-prefix-stats.json",
    proof="kvmend_fixes.proofs.vllm_prefix_stats",
    demo="kvmend_fixes.demos.vllm_prefix_stats",
)
