"""tinyserve-used-blocks: a refused allocation is not counted as blocks in use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kvmend.api import AFFECTED, FIXED, UNKNOWN, Body, Context, Finding, Fix, Framework, Site, Sources

_POOL = "tinyserve.pool"


def count_granted(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `BlockPool.allocate`: what a refused allocation added to `used` is taken off again."""
    counters: Any = context.counters

    @functools.wraps(original)
    def allocate(pool: Any, *args: Any, **kwargs: Any) -> Any:
        used = pool.used
        blocks = original(pool, *args, **kwargs)
        if blocks is None and pool.used != used:
            pool.used = used
            counters.taken_off += 1
        return blocks

    return allocate


def probe(sources: Sources) -> Finding:
    """Affected: blocks are counted before the check. Fixed: after it."""
    allocate = sources.body(_POOL, "BlockPool.allocate")
    if allocate is None:
        return Finding(state=UNKNOWN, reason=f"there is no BlockPool.allocate in {_POOL}")
    count, refusal = allocate.text.find("self.used +="), allocate.text.find("return None")
    if count < 0 or refusal < 0:
        return Finding(state=UNKNOWN, reason="allocate() does not count or does not refuse in a known way")
    if count < refusal:
        return Finding(state=AFFECTED, reason="blocks are counted before it is known whether there are so many")
    return Finding(state=FIXED, reason="only blocks that were granted are counted")


FIX = Fix(
    id="tinyserve-used-blocks",
    switch="KVMEND_TINYSERVE_USED_BLOCKS",
    framework=Framework(name="tinyserve", package="tinyserve", distributions=("tinyserve",), logger="tinyserve"),
    summary="A refused allocation is not counted as blocks in use.",
    why="Symptom: the gauge of blocks in use passes the size of the pool.\n\nTrigger: any refused allocation.",
    how="What a refused allocation added is taken off again before the caller sees the pool.",
    remove_when="The server runs tinyserve 1.1 or later.",
    upstream=("https://example.org/tinyserve/issues/1",),
    sites=(Site(module=_POOL, qualname="BlockPool.allocate", wrap=count_granted),),
    bodies=(Body(module=_POOL, qualname="BlockPool.release"),),
    probe=probe,
    counters={"taken_off": "refused allocations that were not counted"},
    fingerprints="kvmend_tinyserve:used-blocks.json",
    proof="kvmend_tinyserve.proof",
    releases="1.0",
)
