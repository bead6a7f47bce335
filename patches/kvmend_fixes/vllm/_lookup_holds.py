"""Wrappers of vllm-prefix-stats: hold what a lookup counts, settle it at admission."""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections.abc import Callable
from typing import Any

from kvmend.api import Context, Counters

#: The lookup increments the statistics' attributes itself (0.8.5 - 0.11.0), instead of calling `record`.
IN_PLACE = "in-place-counters"
#: `schedule()` looks up and records past the lookup seam for hybrid models with a connector (0.24 - 0.26).
INLINE = "inline-lookup"

_COUNTS = ("requests", "queries", "hits")
_PREEMPTED = tuple(f"preempted_{name}" for name in _COUNTS)


class _Pending:
    """The stand-in for a manager's statistics object while the original looks up, and what it leaves open.

    `record` and the three plain counters are what the two generations of the original use; `recorded` holds the
    arguments of `record` after this object, which names the manager, or None. The rest belongs to an inline lookup:
    `inline_hashes` the request's block hashes, which name the request because the coordinator is not told which one
    it is; while it counts, `open_stats` the statistics it counts into and `open_before` their values before; and
    then `inline_counts`, what it counted.
    """

    __slots__ = (
        "hits",
        "inline_counts",
        "inline_hashes",
        "open_before",
        "open_stats",
        "queries",
        "recorded",
        "requests",
    )

    def __init__(self) -> None:
        self.recorded: tuple[_Pending, int, int, bool] | None = None
        self.requests = self.queries = self.hits = 0
        self.open_stats: Any = None
        self.open_before: tuple[int, ...] = ()
        self.inline_hashes: Any = None
        self.inline_counts: tuple[int, ...] = ()

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Same call as `PrefixCacheStats.record`: tokens looked up, tokens found, resumed after a preemption."""
        self.recorded = (self, num_tokens, num_hits, preempted)


def _adopt(manager: Any) -> _Pending:
    """Gives a manager its stand-in."""
    pending = manager._kvmend_pending = _Pending()
    return pending


def hold_lookup(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `KVCacheManager.get_computed_blocks(request)`: nothing it counts reaches the statistics yet."""
    in_place = IN_PLACE in context.features
    inline = INLINE in context.features
    counters = context.counters
    # Not counted lookup by lookup: whatever was held and not settled was dropped.
    counters.derive("dropped", lambda: counters.held - counters.settled)

    def holding(look: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def get_computed_blocks(manager: Any, request: Any) -> Any:
            stats = manager.prefix_cache_stats
            if stats is None:
                return look(manager, request)
            try:
                pending = manager._kvmend_pending
            except AttributeError:
                pending = _adopt(manager)
            if inline and pending.open_stats is not None:
                _hold_inline(pending, counters)
            pending.recorded = None
            if in_place:
                pending.requests = pending.queries = pending.hits = 0
            manager.prefix_cache_stats = pending
            try:
                result = look(manager, request)
            finally:
                manager.prefix_cache_stats = stats
            if pending.recorded is not None:
                request._kvmend_lookup = pending.recorded
                counters.held += 1
            elif in_place and pending.requests:
                request._kvmend_lookup = (pending, pending.requests, pending.queries, pending.hits)
                counters.held += 1
            else:
                request._kvmend_lookup = None
            return result

        return get_computed_blocks

    if len(_by_position(original)) == 2:
        return functools.wraps(original)(holding(original))

    @functools.wraps(original)
    def get_computed_blocks(manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        # Somebody else's wrapper is beneath, which may take more than the original does.
        return holding(lambda manager, request: original(manager, request, *args, **kwargs))(manager, request)

    return get_computed_blocks


def settle_admission(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `KVCacheManager.allocate_slots(request, ...)`: an admission settles the request's pending lookup."""
    in_place = IN_PLACE in context.features
    inline = INLINE in context.features
    counters = context.counters

    def allocate_slots(manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        pending = getattr(manager, "_kvmend_pending", None) or _adopt(manager)
        lookup = getattr(request, "_kvmend_lookup", None)
        if lookup is None or lookup[0] is pending:
            request._kvmend_lookup = None
        if pending.inline_hashes is not None:
            if pending.open_stats is not None:
                _hold_inline(pending, counters)
            if pending.inline_hashes is request.block_hashes:
                return admit_inline(manager, pending, request, args, kwargs)
            _drop_inline(pending)
        blocks = original(manager, request, *args, **kwargs)
        # A request that has computed tokens is running, or resumed after an asynchronous load: not an admission
        # that a lookup led to. It can be pending only because somebody probed the cache for it.
        if lookup is not None and lookup[0] is pending and blocks is not None and request.num_computed_tokens == 0:
            stats = manager.prefix_cache_stats
            if stats is not None and not (in_place and _skips_cache(request)):
                if in_place:
                    for name, count in zip(_COUNTS, lookup[1:], strict=True):
                        setattr(stats, name, getattr(stats, name) + count)
                else:
                    stats.record(*lookup[1:])
                counters.settled += 1
        return blocks

    def admit_inline(manager: Any, pending: _Pending, request: Any, args: Any, kwargs: Any) -> Any:
        counted = pending.inline_counts
        _drop_inline(pending)
        blocks = original(manager, request, *args, **kwargs)
        # The inline path counts whatever these two say; a lookup that may not read the cache is none.
        if any(counted) and blocks is not None and request.num_computed_tokens == 0 and manager.enable_caching:
            stats = manager.prefix_cache_stats
            if stats is not None and not request.skip_reading_prefix_cache:
                for name, count in zip((*_COUNTS, *_PREEMPTED), counted, strict=True):
                    setattr(stats, name, getattr(stats, name) + count)
                counters.settled += 1
        return blocks

    return _only_if_pending(original, allocate_slots, inline)


def _by_position(original: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function that takes all of them by position; empty if it is another kind of function."""
    parameters = list(inspect.signature(original, follow_wrapped=False).parameters.values())
    return parameters if all(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters) else []


def _only_if_pending(original: Callable[..., Any], settling: Callable[..., Any], inline: bool) -> Callable[..., Any]:
    """A function with the very parameters of `original` that calls `settling` if a lookup is pending.

    Every running request comes through here at every step. A wrapper that takes and passes on `*args, **kwargs`
    costs 300 ns a call, a tenth of what it wraps; one with the parameters spelt out costs 35 ns. Their names differ
    from release to release, so the function is made from the signature, as `dataclasses` makes an `__init__`.
    """
    parameters = _by_position(original)
    if not parameters:
        # Somebody else's wrapper; it may care which arguments come by name.
        return functools.wraps(original)(settling)
    names = [each.name for each in parameters]
    optional = {f"default_{each.name}": each.default for each in parameters if each.default is not each.empty}
    signature = ", ".join(f"{name}=default_{name}" if f"default_{name}" in optional else name for name in names)
    no_inline = f" and {names[0]}._kvmend_pending.inline_hashes is None" if inline else ""
    source = f"""
def allocate_slots({signature}):
    try:
        idle = {names[1]}._kvmend_lookup is None{no_inline}
    except AttributeError:
        idle = False
    if idle:
        return original({", ".join(names)})
    return settling({", ".join(names)})
"""
    scope: dict[str, Any] = {"__name__": __name__, "original": original, "settling": settling, **optional}
    exec(compile(source, __file__, "exec"), scope)
    made: Callable[..., Any] = scope["allocate_slots"]
    return functools.wraps(original)(made)


def meet_manager(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `KVCacheManager.__init__`: a class that bypasses the fix is found when the engine is made.

    And a coordinator learns whose it is, which the inline path never says.
    """
    inline = INLINE in context.features

    @functools.wraps(original)
    def __init__(manager: Any, *args: Any, **kwargs: Any) -> None:
        original(manager, *args, **kwargs)
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
            pending = getattr(manager, "_kvmend_pending", None) or _adopt(manager)
            if pending.open_stats is not None:
                _hold_inline(pending, counters)
            pending.open_stats = manager.prefix_cache_stats
            pending.open_before = _counts_of(pending.open_stats)
            pending.inline_hashes = block_hashes
        return found

    return find_longest_cache_hit_per_group


def drop_inline_lookup(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `KVCacheManager.make_prefix_cache_stats()`: a step's statistics leave without a pending lookup."""
    counters = context.counters

    @functools.wraps(original)
    def make_prefix_cache_stats(manager: Any, *args: Any, **kwargs: Any) -> Any:
        pending = getattr(manager, "_kvmend_pending", None)
        if pending is not None and pending.inline_hashes is not None:
            if pending.open_stats is not None:
                _hold_inline(pending, counters)
            _drop_inline(pending)
        if manager.coordinator not in _managers:
            _link(manager)
        return original(manager, *args, **kwargs)

    return make_prefix_cache_stats


#: Whose a coordinator is. Beside the objects, not on them: they can still be pickled and copied.
_managers: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def _link(manager: Any) -> None:
    _managers[manager.coordinator] = weakref.ref(manager)


_counts_of: Callable[[Any], tuple[int, ...]] = operator.attrgetter(*_COUNTS, *_PREEMPTED)


def _hold_inline(pending: _Pending, counters: Counters) -> None:
    """Takes what an inline lookup counted out of the statistics again; they are what they were before it."""
    stats, before = pending.open_stats, pending.open_before
    now = _counts_of(stats)
    pending.inline_counts = tuple(new - old for new, old in zip(now, before, strict=True))
    if now != before:
        for name, value in zip((*_COUNTS, *_PREEMPTED), before, strict=True):
            setattr(stats, name, value)
        counters.held += 1
    pending.open_stats, pending.open_before = None, ()


def _drop_inline(pending: _Pending) -> None:
    pending.inline_hashes, pending.inline_counts = None, ()


def _skips_cache(request: Any) -> bool:
    """Prompt log-probabilities need every token computed; 0.8.5 counts such a request though it looks nothing up."""
    return getattr(getattr(request, "sampling_params", None), "prompt_logprobs", None) is not None
