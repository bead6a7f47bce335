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

    `record` and the three plain counters are what the two generations of the original use; `found` holds the
    arguments of `record` after this object, which names the manager, or None. The rest belongs to an inline lookup:
    `inline_hashes` the request's block hashes, which name the request because the coordinator is not told which one
    it is; while it counts, `open_stats` the statistics it counts into and `open_before` their values before; and
    then `inline_counts`, what it counted. While `watchful`, slots for a running request may drop a lookup: an inline
    one is pending or, for good, somebody has `probed` a request with computed tokens.
    """

    __slots__ = (
        "found",
        "hits",
        "inline_counts",
        "inline_hashes",
        "open_before",
        "open_stats",
        "probed",
        "queries",
        "requests",
        "watchful",
    )

    def __init__(self) -> None:
        self.found: tuple[Any, ...] | None = None
        self.requests = self.queries = self.hits = 0
        self.open_stats: Any = None
        self.open_before: tuple[int, ...] = ()
        self.inline_hashes: Any = None
        self.inline_counts: tuple[int, ...] = ()
        self.watchful = self.probed = False

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Same call as `PrefixCacheStats.record`: tokens looked up, tokens found, resumed after a preemption."""
        self.found = (self, num_tokens, num_hits, preempted)


def _adopt(manager: Any) -> _Pending:
    """Gives a manager its stand-in."""
    pending = manager._kvmend_pending = _Pending()
    return pending


def hold_lookup(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `KVCacheManager.get_computed_blocks(request)`: nothing it counts reaches the statistics yet."""
    counters = context.counters
    # Not counted lookup by lookup: whatever was held and not settled was dropped.
    counters.derive("dropped", lambda: counters.held - counters.settled)
    recording = _recording if IN_PLACE in context.features else _as_it_is
    if len(_by_position(original)) == 2:
        return functools.wraps(original)(_holding(recording(original), counters))

    @functools.wraps(original)
    def get_computed_blocks(manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        # Somebody else's wrapper is beneath, which may take more than the original does.
        look = recording(lambda manager, request: original(manager, request, *args, **kwargs))
        return _holding(look, counters)(manager, request)

    return get_computed_blocks


def _as_it_is(look: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return look


def _holding(look: Callable[[Any, Any], Any], counters: Counters) -> Callable[[Any, Any], Any]:
    # Runs for every waiting request at every step. Measured beyond a wrapper that only passes the call on: 15 ns for
    # the stand-in, 25 ns for the counter. What a request keeps lies far from everything else that a step touches.
    def get_computed_blocks(manager: Any, request: Any) -> Any:
        stats = manager.prefix_cache_stats
        if stats is None:
            return look(manager, request)
        try:
            pending = manager._kvmend_pending
        except AttributeError:
            pending = _adopt(manager)
        pending.found = None
        manager.prefix_cache_stats = pending
        try:
            result = look(manager, request)
        finally:
            manager.prefix_cache_stats = stats
        try:
            request._kvmend_lookup = found = pending.found
            if found is not None:
                counters.held += 1
                if request.num_computed_tokens:
                    pending.watchful = pending.probed = True
        except AttributeError:
            # Somebody probes with a request of a kind of their own, which no admission comes of.
            return result
        return result

    return get_computed_blocks


def _recording(look: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A lookup that increments the counters itself as one that leaves what it counted in the stand-in, as `record`."""

    def get_computed_blocks(manager: Any, request: Any) -> Any:
        pending = manager.prefix_cache_stats
        if pending is None:
            return look(manager, request)
        pending.requests = pending.queries = pending.hits = 0
        result = look(manager, request)
        if pending.requests:
            pending.found = (pending, pending.requests, pending.queries, pending.hits)
        return result

    return get_computed_blocks


def settle_admission(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `KVCacheManager.allocate_slots(request, ...)`: an admission settles the request's pending lookup."""
    in_place = IN_PLACE in context.features
    counters = context.counters

    def take(manager: Any, request: Any) -> tuple[Any, ...] | None:
        """What is to be settled if the request gets its slots; from now on it is pending no more."""
        pending = getattr(manager, "_kvmend_pending", None) or _adopt(manager)
        lookup: tuple[Any, ...] | None = getattr(request, "_kvmend_lookup", None)
        if lookup is not None:
            if lookup[0] is pending:
                request._kvmend_lookup = None
            else:
                lookup = None
        if pending.inline_hashes is not None:
            if pending.open_stats is not None:
                _hold_inline(pending, counters)
            if pending.inline_hashes is request.block_hashes:
                # The inline path counts whatever these two say; a lookup that may not read the cache is none.
                read = manager.enable_caching and not request.skip_reading_prefix_cache
                lookup = (pending, *pending.inline_counts) if read and any(pending.inline_counts) else None
            _drop_inline(pending)
        # A request that has computed tokens is running, or resumed after an asynchronous load: not an admission
        # that a lookup led to. It can be pending only because somebody probed the cache for it.
        return None if request.num_computed_tokens else lookup

    def settle(manager: Any, request: Any, lookup: tuple[Any, ...]) -> None:
        stats = manager.prefix_cache_stats
        if stats is None or (in_place and _skips_cache(request)):
            return
        counters.settled += 1
        if in_place or len(lookup) > 4:
            for name, count in zip((*_COUNTS, *_PREEMPTED), lookup[1:], strict=False):
                setattr(stats, name, getattr(stats, name) + count)
        else:
            stats.record(lookup[1], lookup[2], lookup[3])

    parameters = _by_position(original)
    if parameters:
        return functools.wraps(original)(_spelt_out(original, parameters, take, settle))

    @functools.wraps(original)
    def allocate_slots(manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        # Somebody else's wrapper is beneath; it may care which arguments come by name.
        lookup = take(manager, request)
        blocks = original(manager, request, *args, **kwargs)
        if lookup is not None and blocks is not None:
            settle(manager, request, lookup)
        return blocks

    return allocate_slots


def _by_position(original: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function that takes all of them by position; empty if it is another kind of function."""
    parameters = list(inspect.signature(original, follow_wrapped=False).parameters.values())
    return parameters if all(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters) else []


def _spelt_out(
    original: Callable[..., Any],
    parameters: list[inspect.Parameter],
    take: Callable[[Any, Any], tuple[Any, ...] | None],
    settle: Callable[[Any, Any, tuple[Any, ...]], None],
) -> Callable[..., Any]:
    """The wrapper of `allocate_slots` with the very parameters of the original.

    Every running request comes through here at every step. A wrapper that takes and passes on `*args, **kwargs`
    costs 300 ns a call, a tenth of what it wraps; one with the parameters spelt out costs 35 ns. Their names differ
    from release to release, so the function is made from the signature, as `dataclasses` makes an `__init__`. For a
    running request it reads what `schedule()` has just read, not the lookup that the request keeps.
    """
    names = [each.name for each in parameters]
    manager, request, everything = names[0], names[1], ", ".join(names)
    optional = {f"default_{each.name}": each.default for each in parameters if each.default is not each.empty}
    signature = ", ".join(f"{name}=default_{name}" if f"default_{name}" in optional else name for name in names)
    source = f"""
def allocate_slots({signature}):
    try:
        running = {request}.num_computed_tokens and not {manager}._kvmend_pending.watchful
    except AttributeError:
        running = False
    if running:
        return original({everything})
    lookup = take({manager}, {request})
    blocks = original({everything})
    if lookup is not None and blocks is not None:
        settle({manager}, {request}, lookup)
    return blocks
"""
    scope: dict[str, Any] = {"__name__": __name__, "original": original, "take": take, "settle": settle, **optional}
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
            pending.inline_hashes, pending.watchful = block_hashes, True
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
    pending.watchful = pending.probed


def _skips_cache(request: Any) -> bool:
    """Prompt log-probabilities need every token computed; 0.8.5 counts such a request though it looks nothing up."""
    return getattr(getattr(request, "sampling_params", None), "prompt_logprobs", None) is not None
