"""Wrappers of vllm-prefix-stats: hold what a lookup counts, settle it at admission."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from kvmend.api import Context, Counters
from kvmend_fixes.vllm._lookups import Lookup, adopt, counts_of, drop_inline, dropped, hold_inline, keeper_of

#: The lookup increments the statistics' attributes itself (0.8.5 - 0.11.0), instead of calling `record`.
IN_PLACE = "in-place-counters"
#: `schedule()` looks up and records past the lookup seam for hybrid models with a connector (0.24 - 0.26).
INLINE = "inline-lookup"


def hold_lookup(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `KVCacheManager.get_computed_blocks(request)`: nothing it counts reaches the statistics yet."""
    counters = context.counters
    # Not counted lookup by lookup: a lookup that is not settled, or not yet, keeps its place in a ring.
    counters.derive("dropped", lambda _: dropped(counters))
    counters.derive("held", lambda now: now["dropped"] + now["settled"])
    recording = _recording if IN_PLACE in context.features else _as_it_is
    if _is_upstreams(original):
        look = recording(original)
        careful = _holding(look, counters)
        return functools.wraps(original)(careful if IN_PLACE in context.features else _holding_fast(look, careful))

    @functools.wraps(original)
    def get_computed_blocks(manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        # Somebody else's wrapper is beneath, which may take more than the original does.
        look = recording(lambda manager, request: original(manager, request, *args, **kwargs))
        return _holding(look, counters)(manager, request)

    return get_computed_blocks


def _as_it_is(look: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return look


def _holding(look: Callable[[Any, Any], Any], counters: Counters) -> Callable[[Any, Any], Any]:
    def get_computed_blocks(manager: Any, request: Any) -> Any:
        stats = manager.prefix_cache_stats
        if stats is None:
            return look(manager, request)
        lookup = keeper_of(manager, counters).free
        if lookup is stats:  # a wrapper beneath looks up something else in the middle of a lookup
            lookup = lookup.next
        manager.prefix_cache_stats = lookup
        try:
            result = look(manager, request)
        except BaseException:
            lookup.request_id = None
            raise
        finally:
            manager.prefix_cache_stats = stats
        # Somebody may probe with a request of a kind of their own, which no admission comes of.
        lookup.request_id = getattr(request, "request_id", None)
        return result

    return get_computed_blocks


def _holding_fast(look: Callable[[Any, Any], Any], careful: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The same with nobody else's wrapper beneath.

    Runs for every waiting request at every step, each of which takes 47,000 instructions: what is left out here, and
    in the stand-in's `record`, counts. An object that is made, or a counter that goes up, costs more than the rest.
    """

    def get_computed_blocks(manager: Any, request: Any) -> Any:
        stats = manager.prefix_cache_stats
        if stats is None:
            return look(manager, request)
        try:
            lookup = manager._kvmend_keeper.free
            lookup.request_id = request.request_id
        except AttributeError:
            return careful(manager, request)
        manager.prefix_cache_stats = lookup
        try:
            return look(manager, request)
        except BaseException:
            lookup.request_id = None
            raise
        finally:
            manager.prefix_cache_stats = stats

    return get_computed_blocks


def _recording(look: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A lookup that increments the counters itself as one that calls `record`."""

    def get_computed_blocks(manager: Any, request: Any) -> Any:
        lookup = manager.prefix_cache_stats
        if lookup is None:
            return look(manager, request)
        lookup.requests = lookup.queries = lookup.hits = 0
        result = look(manager, request)
        if lookup.requests and not _skips_cache(request):
            lookup.record(lookup.queries, lookup.hits, False)
        return result

    return get_computed_blocks


def settle_admission(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `KVCacheManager.allocate_slots(request, ...)`: an admission settles the request's pending lookup."""
    counters = context.counters
    settle = _add if IN_PLACE in context.features else _record

    def take(manager: Any, request: Any) -> Lookup | None:
        """What is to be settled if the request gets its slots; it is pending and counted as dropped no more."""
        lookup = find(manager, request)
        if lookup is not None:
            counters.dropped -= 1
        return lookup

    def find(manager: Any, request: Any) -> Lookup | None:
        keeper = keeper_of(manager, counters)
        lookup = keeper.take(request)
        if keeper.inline_hashes is None:
            return lookup
        hold_inline(keeper)
        if keeper.inline_hashes is request.block_hashes:
            # The inline path counts whatever these two say; a lookup that may not read the cache is none.
            read = manager.enable_caching and not request.skip_reading_prefix_cache
            lookup = keeper.inline_lookup if read else None
        drop_inline(keeper)
        return lookup

    @functools.wraps(original)
    def allocate_slots(manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        lookup = None if request.num_computed_tokens else take(manager, request)
        if lookup is None:
            return original(manager, request, *args, **kwargs)
        # Before the call: somebody else's wrapper may look up beneath, and write in the same place.
        counted = lookup.num_tokens, lookup.num_hits, lookup.preempted
        blocks = original(manager, request, *args, **kwargs)
        stats = manager.prefix_cache_stats
        if blocks is None or stats is None:
            counters.dropped += 1
        else:
            settle(stats, *counted)
            counters.settled += 1
        return blocks

    if not _is_upstreams(original):
        return allocate_slots
    fast = _spelt_out(original, allocate_slots, settle, counters, inline=INLINE in context.features)
    return functools.wraps(original)(fast)


def _record(stats: Any, num_tokens: int, num_hits: int, preempted: bool) -> None:
    stats.record(num_tokens, num_hits, preempted)


def _add(stats: Any, num_tokens: int, num_hits: int, _preempted: bool) -> None:
    stats.requests += 1
    stats.queries += num_tokens
    stats.hits += num_hits


def _is_upstreams(original: Callable[..., Any]) -> bool:
    """Whether this is vLLM's own method, as far as can be seen: no wrapper, and all parameters go by position."""
    parameters = inspect.signature(original, follow_wrapped=False).parameters.values()
    return not hasattr(original, "__wrapped__") and all(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)


def _spelt_out(
    original: Callable[..., Any],
    careful: Callable[..., Any],
    settle: Callable[[Any, int, int, bool], None],
    counters: Counters,
    inline: bool,
) -> Callable[..., Any]:
    """The wrapper of `allocate_slots` with the very parameters of the original.

    Every running request comes through here at every step. A wrapper that takes and passes on `*args, **kwargs`
    costs 300 ns a call, a tenth of what it wraps; one with the parameters spelt out costs 35 ns. Their names differ
    from release to release, so the function is made from the signature, as `dataclasses` makes an `__init__`. An
    admission right after its lookup is settled here; whatever came in between, `careful` has it.
    A request that has computed tokens is running, or resumed after an asynchronous load: not an admission that a
    lookup led to, whoever may have probed the cache for it.
    """
    parameters = list(inspect.signature(original).parameters.values())
    names = [each.name for each in parameters]
    manager, request, everything = names[0], names[1], ", ".join(names)
    optional = {f"default_{each.name}": each.default for each in parameters if each.default is not each.empty}
    signature = ", ".join(f"{name}=default_{name}" if f"default_{name}" in optional else name for name in names)
    stats = f"{manager}.prefix_cache_stats"
    settling = f"{stats}.record(" if settle is _record else f"settle({stats}, "
    source = f"""
def allocate_slots({signature}):
    if {request}.num_computed_tokens:
        return original({everything})
    try:
        keeper_ = {manager}._kvmend_keeper
        lookup_ = keeper_.free.before
    except AttributeError:
        return careful({everything})
    if lookup_.request_id != {request}.request_id{" or keeper_.inline_hashes is not None" if inline else ""}:
        return careful({everything})
    keeper_.free = lookup_
    blocks_ = original({everything})
    if blocks_ is None:
        counters.dropped += 1
        return None
    try:
        {settling}lookup_.num_tokens, lookup_.num_hits, lookup_.preempted)
        counters.settled += 1
    except AttributeError:  # the manager has no statistics any more
        counters.dropped += 1
    return blocks_
"""
    scope: dict[str, Any] = {"__name__": __name__, "original": original, "careful": careful, "settle": settle}
    scope |= {"counters": counters, **optional}
    exec(compile(source, __file__, "exec"), scope)
    made: Callable[..., Any] = scope["allocate_slots"]
    return made


def meet_manager(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `KVCacheManager.__init__`: a class that bypasses the fix is found when the engine is made.

    And a coordinator learns whose it is, which the inline path never says.
    """
    inline = INLINE in context.features

    @functools.wraps(original)
    def __init__(manager: Any, *args: Any, **kwargs: Any) -> None:
        original(manager, *args, **kwargs)
        adopt(manager, context.counters)
        context.check_shadows(type(manager))
        if inline:
            context.check_shadows(type(manager.coordinator))
            _link(manager)

    return __init__


def hold_inline_lookup(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `HybridKVCacheCoordinator.find_longest_cache_hit_per_group(block_hashes, max_length)`."""
    counters = context.counters

    @functools.wraps(original)
    def find_longest_cache_hit_per_group(coordinator: Any, block_hashes: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(coordinator, block_hashes, *args, **kwargs)
        link = _managers.get(coordinator)
        manager = link() if link is not None else None
        if manager is not None and manager.prefix_cache_stats is not None:
            keeper = keeper_of(manager, counters)
            hold_inline(keeper)
            keeper.open_stats = manager.prefix_cache_stats
            keeper.open_before = counts_of(keeper.open_stats)
            keeper.inline_hashes = block_hashes
        return found

    return find_longest_cache_hit_per_group


def drop_inline_lookup(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `KVCacheManager.make_prefix_cache_stats()`: a step's statistics leave without a pending lookup."""

    @functools.wraps(original)
    def make_prefix_cache_stats(manager: Any, *args: Any, **kwargs: Any) -> Any:
        keeper = getattr(manager, "_kvmend_keeper", None)
        if keeper is not None and keeper.inline_hashes is not None:
            hold_inline(keeper)
            drop_inline(keeper)
        if manager.coordinator not in _managers:
            _link(manager)
        return original(manager, *args, **kwargs)

    return make_prefix_cache_stats


#: Whose a coordinator is. Beside the objects, not on them: they can still be pickled and copied.
_managers: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def _link(manager: Any) -> None:
    _managers[manager.coordinator] = weakref.ref(manager)


def _skips_cache(request: Any) -> bool:
    """Prompt log-probabilities need every token computed; 0.8.5 counts such a request though it looks nothing up."""
    return getattr(getattr(request, "sampling_params", None), "prompt_logprobs", None) is not None
