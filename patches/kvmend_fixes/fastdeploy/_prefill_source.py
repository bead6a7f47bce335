"""Reads off the source of a FastDeploy tree what its prefill node does and what its places are called."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from kvmend.api import AFFECTED, NOT_AFFECTED, UNKNOWN, BodySource, Finding, Sources

RESOURCE_MANAGER = "fastdeploy.engine.sched.resource_manager_v1"
CACHE_MANAGER = "fastdeploy.cache_manager.prefix_cache_manager"
NODES = "fastdeploy.cache_manager.cache_data"

#: Preallocation does not publish (up to 2.5); PR 7364 does.
NO_PUBLICATION = "no-publication"
#: `update_cache_blocks` does not return early when there is nothing new to cache (up to 7364); PR 7797 does.
NO_GUARD = "no-guard"
#: The tree has these methods.
STORAGE = "storage"
OUTPUT_CACHING = "output-caching"

_NEEDED = (
    "preallocate_resource_in_p",
    "get_prefix_cached_blocks",
    "_get_num_new_tokens",
    "_prepare_prefill_task",
    "schedule",
)


def probe(sources: Sources) -> Finding:
    """Judges a tree: every one that preallocates on a prefill node reads blocks too early or publishes too late."""
    if sources.body(RESOURCE_MANAGER, "ResourceManagerV1") is None:
        return Finding(state=NOT_AFFECTED, reason="no ResourceManagerV1, hence no preallocation on prefill nodes")
    bodies: dict[str, BodySource] = {}
    for name in _NEEDED:
        body = sources.body(RESOURCE_MANAGER, f"ResourceManagerV1.{name}")
        if body is None:
            return Finding(state=UNKNOWN, reason=f"ResourceManagerV1 has no {name}")
        bodies[name] = body
    update = sources.body(CACHE_MANAGER, "PrefixCacheManager.update_cache_blocks")
    if update is None or sources.body(NODES, "BlockNode") is None:
        return Finding(state=UNKNOWN, reason="PrefixCacheManager has no update_cache_blocks, or there is no BlockNode")
    problem = _schedule_problem(bodies["schedule"])
    place, cached_blocks = _place(update), _cached_blocks(update)
    if problem or place is None or cached_blocks is None:
        return Finding(state=UNKNOWN, reason=problem or "update_cache_blocks keeps no place in the tree")
    features = set()
    if not _calls(bodies["preallocate_resource_in_p"], "update_cache_blocks"):
        features.add(NO_PUBLICATION)
    if not _has_guard(update):
        features.add(NO_GUARD)
    for feature, name in ((STORAGE, "write_cache_to_storage"), (OUTPUT_CACHING, "cache_output_blocks")):
        if sources.body(CACHE_MANAGER, f"PrefixCacheManager.{name}") is not None:
            features.add(feature)
    if NO_PUBLICATION in features and NO_GUARD not in features:
        return Finding(state=UNKNOWN, reason="an early return in update_cache_blocks without an early publication")
    reason = (
        "prefix blocks are published when chunks are scheduled, once per request"
        if NO_PUBLICATION in features
        else "prefix blocks are published before they are computed, and read whether they are or not"
    )
    facts = {"place": place, "cached_blocks": cached_blocks}
    return Finding(state=AFFECTED, reason=reason, features=frozenset(features), facts=facts)


def _calls(body: BodySource | ast.AST, name: str) -> list[ast.Call]:
    """Calls of `….name(…)`, in the order of the source."""
    tree = body.tree if isinstance(body, BodySource) else body
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name
    ]
    return sorted(found, key=lambda call: (call.lineno, call.col_offset))


def _schedule_problem(schedule: BodySource) -> str:
    """Why the seams inside `schedule()` would not do, or nothing.

    Every chunk must be planned by `_get_num_new_tokens`, then prepared by `_prepare_prefill_task`, under the lock.
    """
    planned, prepared = _calls(schedule, "_get_num_new_tokens"), _calls(schedule, "_prepare_prefill_task")
    if not planned or not prepared or prepared[0].lineno < planned[0].lineno:
        return "schedule() does not plan a chunk with _get_num_new_tokens before it prepares it"
    locked = [block for block in _with_lock(schedule.tree) for _ in _calls(block, "_get_num_new_tokens")]
    return "" if len(locked) == len(planned) else "schedule() plans chunks without holding the manager's lock"


def _with_lock(tree: ast.AST) -> Iterator[ast.With]:
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and any(
            isinstance(item.context_expr, ast.Attribute) and item.context_expr.attr == "lock" for item in node.items
        ):
            yield node


def _place(update: BodySource) -> str | None:
    """Name of the attribute that keeps (node, tokens) of each request: `last_node, tokens = self.<name>[request]`."""
    for node in ast.walk(update.tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and len(node.targets[0].elts) == 2
            and isinstance(node.value, ast.Subscript)
            and isinstance(node.value.value, ast.Attribute)
        ):
            return node.value.value.attr
    return None


def _cached_blocks(update: BodySource) -> str | None:
    """Name of the request's field that says how many of its blocks the tree owns: `task.<name> = tokens // size`."""
    for node in ast.walk(update.tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Attribute)
            and isinstance(node.value, ast.BinOp)
            and isinstance(node.value.op, ast.FloorDiv)
        ):
            return node.targets[0].attr
    return None


def _has_guard(update: BodySource) -> bool:
    """Whether there is an `if a <= b: return` before the path is built."""
    builds = _calls(update, "mm_build_path")
    last = builds[0].lineno if builds else 0
    return any(
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Compare)
        and isinstance(node.test.ops[0], ast.LtE | ast.GtE)
        and len(node.body) == 1
        and isinstance(node.body[0], ast.Return)
        and node.lineno < last
        for node in ast.walk(update.tree)
    )
