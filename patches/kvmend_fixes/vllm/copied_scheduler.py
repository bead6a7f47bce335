"""vllm-prefix-stats-copied-scheduler: a scheduler with a loop of its own has its prefix-cache lookups counted."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from kvmend.api import (
    AFFECTED,
    FIXED,
    NOT_AFFECTED,
    UNKNOWN,
    Body,
    BodySource,
    Context,
    Finding,
    Fix,
    Site,
    Sources,
    reached,
)
from kvmend_fixes.vllm import VLLM
from kvmend_fixes.vllm._own_loops import helped_by, package_of, scheduler_above
from kvmend_fixes.vllm._scheduler_source import MANAGER, SCHEDULER, counting_bodies

WHY = """\
Symptom: `vllm:prefix_cache_queries` and `vllm:prefix_cache_hits` stay at 0 for ever, although prefixes are found and
reused, with a scheduler class that is not vLLM's own (`--scheduler-cls`, or a hardware plugin's).

Trigger: since 0.27.0 a lookup is counted by `Scheduler.schedule()`, which calls
`KVCacheManager.record_prefix_cache_stats` at the admission. A scheduler class with a `schedule()` of its own, copied
before that or written anew, does not call it, and nobody else does."""

HOW = """\
When a KV cache manager is made, the scheduler that makes it is looked at, once: does its `schedule()`, or anything that
this visibly calls on the way, call `record_prefix_cache_stats`? vLLM's own scheduler does, and so does a subclass that
inherits `schedule()` or calls it by `super()`; they run as released, at no cost. Only where nobody calls it, this one
manager gets lookup, admission and counting of its own: a lookup is noted on its request, and when that request is then
admitted (`allocate_slots` returns blocks and it had none computed) it is counted by the manager's own
`record_prefix_cache_stats`. If the scheduler calls that for the same admission after all, its call is left out.

Safe because: what is scheduled does not depend on these counters; arguments and return values pass through whatever
their number; an admission is counted at most once, whoever counts it first."""

REMOVE_WHEN = (
    "The scheduler class in use calls record_prefix_cache_stats at each admission, as vLLM's does since 0.27.0."
)

_COUNT = "record_prefix_cache_stats"
_HITS = "num_new_computed_tokens"

#: What a request carries of its lookup, as `_kvmend_hits`: tokens found, if it has not been admitted since, or one
#: of these two; nothing of it is read by vLLM.
_SETTLED = -1
_UNSAID = sys.maxsize


def meet_manager(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `KVCacheManager.__init__`: a manager whose scheduler does not count gets what counts for it."""
    helped = helped_by(context)

    @functools.wraps(original)
    def __init__(manager: Any, *args: Any, **kwargs: Any) -> None:
        original(manager, *args, **kwargs)
        try:
            scheduler = scheduler_above(sys._getframe(1))
            if scheduler is not None and not counts_by_itself(scheduler):
                help_out(manager, scheduler)
        except Exception:  # code that cannot be looked into must not keep an engine from starting
            context.log.warning("kvmend: %s: the scheduler could not be looked at", FIX.id, exc_info=True)

    def help_out(manager: Any, scheduler: type) -> None:
        helped.give(manager, counting_methods(manager, context))
        context.counters.schedulers += 1
        name = f"{scheduler.__module__}.{scheduler.__qualname__}"
        context.log.info("kvmend: %s counts no prefix-cache lookups; they are counted at admission", name)

    return __init__


def counts_by_itself(scheduler: type) -> bool:
    """Whether a scheduler class counts its lookups, as far as its code tells.

    A class that has a loop of its own beside vLLM's (it allocates slots, and also calls `super().schedule()`) does so
    for a part of its admissions only: that is no.
    """
    upstream = beside = False
    for function, names in reached(scheduler, "schedule"):
        if not names:
            continue
        if package_of(function) == "vllm":
            upstream |= _COUNT in names
        elif _COUNT in names or _records(names):
            return True
        else:
            beside |= "allocate_slots" in names
    return upstream and not beside


def _records(names: frozenset[str]) -> bool:
    """Whether a function counts into the statistics past the manager.

    A copy of 0.24 - 0.26 does so too, but only for hybrid models with a connector, whose lookup it makes itself.
    """
    return {"prefix_cache_stats", "record"} <= names and "find_longest_cache_hit_per_group" not in names


def counting_methods(manager: Any, context: Context) -> dict[str, Any]:
    """What a manager gets whose scheduler does not count: its attributes by name, each over its class's method.

    They call the method that the class has at the time of the call, so that other plugins' wrappers keep working.
    """
    counters = context.counters
    place = _place_of_hits(manager)

    def note(request: Any, found: Any) -> Any:
        if manager.prefix_cache_stats is not None and manager.prefix_cache_lookup_enabled(request):
            said = isinstance(found, tuple) and len(found) > 1 and isinstance(found[1], int)
            request._kvmend_hits = found[1] if said else _UNSAID
        return found

    def get_computed_blocks(request: Any, *args: Any, **kwargs: Any) -> Any:
        return note(request, type(manager).get_computed_blocks(manager, request, *args, **kwargs))

    def get_computed_blocks_for_connector(request: Any, *args: Any, **kwargs: Any) -> Any:
        return note(request, type(manager).get_computed_blocks_for_connector(manager, request, *args, **kwargs))

    def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(request, "_kvmend_hits", _SETTLED) == _SETTLED or request.num_computed_tokens:
            return type(manager).allocate_slots(manager, request, *args, **kwargs)
        blocks = type(manager).allocate_slots(manager, request, *args, **kwargs)
        hits = getattr(request, "_kvmend_hits", _SETTLED)
        if blocks is not None and hits != _SETTLED:
            adopted = kwargs[_HITS] if _HITS in kwargs else args[place] if 0 <= place < len(args) else None
            settle(request, hits, adopted)
        return blocks

    def settle(request: Any, hits: int, adopted: int | None) -> None:
        # A scheduler may adopt less than was found, a whole number of blocks if a connector has more. It cannot adopt
        # more, so that a greater number is none of local hits alone.
        hits = min(hits, adopted) if adopted is not None else 0 if hits == _UNSAID else hits
        request._kvmend_hits = _SETTLED
        type(manager).record_prefix_cache_stats(manager, request, hits)
        counters.settled += 1

    def record_prefix_cache_stats(request: Any, *args: Any, **kwargs: Any) -> Any:
        # Whichever comes first counts: the scheduler's own call, before the admission, or the admission.
        lookup = getattr(request, "_kvmend_hits", None)
        if lookup is not None:
            del request._kvmend_hits
        if lookup == _SETTLED:
            counters.left_out += 1
            return None
        return type(manager).record_prefix_cache_stats(manager, request, *args, **kwargs)

    made = (get_computed_blocks, get_computed_blocks_for_connector, allocate_slots, record_prefix_cache_stats)
    return {
        method.__name__: functools.wraps(getattr(manager, method.__name__))(method)
        for method in made
        if hasattr(manager, method.__name__)
    }


def _place_of_hits(manager: Any) -> int:
    """Where `allocate_slots` is told how many tokens to adopt: index among the arguments after the request, or -1."""
    try:
        names = list(inspect.signature(manager.allocate_slots).parameters)
    except (TypeError, ValueError):
        return -1
    return names.index(_HITS) - 1 if _HITS in names else -1


def probe(sources: Sources) -> Finding:
    """Reads from the source who counts lookups.

    Affected: `schedule()` calls `record_prefix_cache_stats`. Not affected: the lookup counts. Fixed: the admission
    does, whatever the scheduler.
    """
    bodies = counting_bodies(sources)
    if isinstance(bodies, Finding):
        return bodies
    lookup, admission, schedule = bodies
    if sources.body(MANAGER, f"KVCacheManager.{_COUNT}") is None:
        if _names(lookup) & {"record", "queries"}:
            return Finding(state=NOT_AFFECTED, reason="the lookup itself counts, whatever the scheduler")
        return Finding(state=UNKNOWN, reason="neither the lookup nor schedule() counts lookups in a known way")
    if _COUNT in _names(admission):
        return Finding(state=FIXED, reason="the admission itself counts, whatever the scheduler")
    if _COUNT in _names(schedule) and not _names(lookup) & {"record", _COUNT}:
        return Finding(state=AFFECTED, reason="only schedule() counts lookups, so a scheduler of one's own counts none")
    return Finding(state=UNKNOWN, reason="neither the admission nor schedule() alone counts lookups")


def _names(source: BodySource) -> set[str]:
    return {node.attr for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)}


FIX = Fix(
    id="vllm-prefix-stats-copied-scheduler",
    switch="KVMEND_VLLM_PREFIX_STATS_COPIED_SCHEDULER",
    framework=VLLM,
    summary="Prefix-cache lookups are counted also for a scheduler class with a schedule() of its own.",
    why=WHY,
    how=HOW,
    remove_when=REMOVE_WHEN,
    upstream=(
        "https://github.com/vllm-project/vllm-ascend/issues/15744",
        "https://github.com/vllm-project/vllm/pull/48860",
    ),
    releases="0.27.0 – 0.33.0",
    sites=(Site(module=MANAGER, qualname="KVCacheManager.__init__", wrap=meet_manager),),
    bodies=(
        Body(module=MANAGER, qualname="KVCacheManager.get_computed_blocks"),
        Body(module=MANAGER, qualname="KVCacheManager.get_computed_blocks_for_connector"),
        Body(module=MANAGER, qualname="KVCacheManager.allocate_slots"),
        Body(module=MANAGER, qualname="KVCacheManager.prefix_cache_lookup_enabled"),
        Body(module=MANAGER, qualname=f"KVCacheManager.{_COUNT}"),
        Body(module=SCHEDULER, qualname="Scheduler.schedule"),
    ),
    probe=probe,
    counters={
        "schedulers": "schedulers that count no lookups",
        "settled": "lookups counted at admission",
        "left_out": "a scheduler's own counts of an admission that was counted already",
    },
    fingerprints="kvmend_fixes.fingerprints:vllm-prefix-stats-copied-scheduler.json",
    proof="kvmend_fixes.proofs.vllm_prefix_stats_copied_scheduler",
)
