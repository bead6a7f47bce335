"""vllm-prefix-stats: a request's prefix-cache lookup is counted once, when the request is admitted."""

from __future__ import annotations

import ast

from kvmend.api import AFFECTED, FIXED, UNKNOWN, Body, BodySource, Finding, Fix, Site, Sources
from kvmend_fixes.vllm import VLLM
from kvmend_fixes.vllm._inline_lookups import hold_inline_lookup
from kvmend_fixes.vllm._lookup_holds import (
    IN_PLACE,
    INLINE,
    RETURNED,
    hold_lookup,
    meet_manager,
    settle_rest,
    settle_step,
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
With a KV connector a lookup counts nothing yet; the request carries what it would have counted. When `schedule()` ends,
the requests that it has put among the running ones were admitted in this step: each one's newest lookup is counted,
once, with vLLM's own values. So is that of a request whose KV is being loaded. No other lookup is.

Without a connector lookups count as ever, and one that leads to no admission ends the scheduling loop: when
`schedule()` ends, the last one is taken back unless its request runs. If there were more lookups than that explains,
somebody's code has looked requests up in the middle of the step: all are taken back, and each admission is counted by
itself.

Where the record follows from the request and from the hits returned (0.11.1 and later) a lookup that is carried is made
not to record; elsewhere all are carried, and a stand-in takes the place of the statistics object while a lookup runs,
and keeps what was counted.

A scheduler with a loop of its own is recognised when it makes its manager: this one manager gets an `allocate_slots`
that counts the request's lookup when it is given its slots. So does the manager of a model with Mamba layers on
0.24 - 0.26, where `schedule()` itself looks up and counts if there is a KV connector; there the counters are noted
after the lookup and put back unless the same request is admitted.

Safe because: what is scheduled does not depend on these counters; arguments and return values pass through untouched
whatever their number; the statistics object that others hold stays the same object between two
`make_prefix_cache_stats` calls; no request is kept alive beyond its step; nothing is copied from vLLM."""

REMOVE_WHEN = "The server runs vLLM 0.27.0 or later, which counts at admission itself; kvmend then says already_fixed."

_COORDINATOR = "vllm.v1.core.kv_cache_coordinator"
_STATS = "vllm.v1.metrics.stats"

#: A lookup of whose record nothing but the hits needs to be known: when there is one, and what is in it.
_RECORD = "self.prefix_cache_stats.record"
_SKIPS = "not self.enable_caching or request.skip_reading_prefix_cache"
_COUNTED = {"num_tokens": "request.num_tokens", "preempted": "request.num_preemptions > 0"}


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
    elif _records_what_it_returns(lookup):
        features.add(RETURNED)
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


def _records_what_it_returns(source: BodySource) -> bool:
    """Whether what a lookup records can be told from its request, the second value returned, and the manager."""
    first, last = source.tree.body[0], source.tree.body[-1]
    if isinstance(first, ast.Expr) and len(source.tree.body) > 1:  # the docstring
        first = source.tree.body[1]
    recording = [node for node in source.tree.body if isinstance(node, ast.If) and _is(node.test, "self.log_stats")]
    records = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call) and _is(node.func, _RECORD)]
    if not (len(records) == len(recording) == 1 and records[0] in ast.walk(recording[0]) and not records[0].args):
        return False
    skips = isinstance(first, ast.If) and isinstance(first.body[0], ast.Return) and _is(first.test, _SKIPS)
    found = last.value.elts if isinstance(last, ast.Return) and isinstance(last.value, ast.Tuple) else []
    counted = {each.arg: ast.unparse(each.value) for each in records[0].keywords}
    return skips and len(found) > 1 and counted == {**_COUNTED, "num_hits": ast.unparse(found[1])}


def _is(node: ast.AST, text: str) -> bool:
    return ast.unparse(node) == text


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
        Site(module=SCHEDULER, qualname="Scheduler.schedule", wrap=settle_step, optional=True),
        Site(module=MANAGER, qualname="KVCacheManager.make_prefix_cache_stats", wrap=settle_rest),
        Site(module=MANAGER, qualname="KVCacheManager.__init__", wrap=meet_manager),
        Site(
            module=_COORDINATOR,
            qualname="HybridKVCacheCoordinator.find_longest_cache_hit_per_group",
            wrap=hold_inline_lookup,
            features=frozenset({INLINE}),
        ),
    ),
    bodies=(
        Body(module=MANAGER, qualname="KVCacheManager.allocate_slots"),
        Body(module=MANAGER, qualname="KVCacheManager.record_prefix_cache_stats"),
        Body(module=MANAGER, qualname="KVCacheManager.reset_prefix_cache"),
        Body(module=_STATS, qualname="PrefixCacheStats"),
    ),
    probe=probe,
    counters={
        "held": "lookups that count only if they lead to an admission",
        "settled": "lookups counted, for an admission that came of them",
        "dropped": "lookups that led to no admission",
    },
    may_fall=("dropped",),
    fingerprints="kvmend_fixes.fingerprints:vllm-prefix-stats.json",
    proof="kvmend_fixes.proofs.vllm_prefix_stats",
    demo="kvmend_fixes.demos.vllm_prefix_stats",
)
