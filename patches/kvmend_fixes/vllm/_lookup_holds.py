"""Wrappers of vllm-prefix-stats: hold what a lookup counts, settle it when the step ends that admits the request."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from kvmend.api import Context, Counters, reached
from kvmend_fixes.vllm._inline_lookups import is_looked_up_inline, link, may_be_looked_up_inline
from kvmend_fixes.vllm._own_loops import package_of, scheduler_above
from kvmend_fixes.vllm._settling import (
    Counted,
    Pending,
    adopt,
    settle_admitted,
    settle_load,
    settle_outside,
)
from kvmend_fixes.vllm._whole_steps import abandon_step, close_step, goes_on, open_step, report_in_step

#: The lookup increments the statistics' attributes itself (0.8.5 - 0.11.0), instead of calling `record`.
IN_PLACE = "in-place-counters"
#: What the lookup records follows from the request and from the second value it returns (0.11.1 - 0.26).
RETURNED = "records-what-it-returns"
#: `schedule()` looks up and records past the lookup seam for hybrid models with a connector (0.24 - 0.26).
INLINE = "inline-lookup"

#: Class and name of the lookup.
_LOOKUP = ["KVCacheManager", "get_computed_blocks"]
#: What the end of a step is known by, among everything that a scheduler's `schedule()` calls.
_ENDS_STEP = "kvmend_ends_step"
#: What a `schedule()` is told that is called without arguments.
_UNTOLD = object()


def hold_lookup(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `KVCacheManager.get_computed_blocks(request)`: nothing it counts reaches the statistics yet."""
    context.counters.derive("dropped", lambda now: now["held"] - now["settled"])
    waiting, preempted = _statuses().WAITING, _statuses().PREEMPTED

    def keep(manager: Any, request: Any, lookup: Any) -> None:
        """A lookup is pending from now on, if it is one that an admission can come of."""
        # Somebody may probe with a request of a kind of their own.
        with contextlib.suppress(AttributeError, TypeError):
            if request.num_computed_tokens or request.status not in (waiting, preempted):
                return
            if not hasattr(manager, "_kvmend_pending"):
                meet_late(manager, context, scheduler_above(sys._getframe(1)))
            if manager._kvmend_step is None:
                manager._kvmend_pending[request] = lookup
            else:
                keep_in_step(manager, request, lookup)

    keep_in_step = _keeping_in_step(context.counters)
    if RETURNED in context.features and _is_upstreams(original):
        context.shared[RETURNED] = True
        return functools.wraps(original)(_known(original, keep, context.counters, waiting, preempted))
    return functools.wraps(original)(_standing_in(original, keep, in_place=IN_PLACE in context.features))


def _keeping_in_step(counters: Counters) -> Callable[[Any, Any, Any], None]:
    loading = _loading()

    def keep_in_step(manager: Any, request: Any, lookup: Any) -> None:
        """The request carries its lookup. By the next one it is known whether its KV is being loaded."""
        before = manager._kvmend_last
        if before is not None and before.status is loading:
            settle_load(manager, before, counters)
        request._kvmend_lookup = lookup
        manager._kvmend_last = request
        counters.held += 1

    return keep_in_step


def _known(
    look: Callable[[Any, Any], Any],
    keep: Callable[[Any, Any, Any], None],
    counters: Counters,
    waiting: Any,
    preempted: Any,
) -> Callable[[Any, Any], Any]:
    """A lookup whose record is known from the request and from what it returns.

    With a connector it does not record: what the original leaves out is more than what is added here, and the request
    is in the processor's cache now, but no more when the step ends. Without one it records as ever. Runs for every
    waiting request at every step, and takes 8 us: on both ways no name of the module is read.
    """
    loading, plain = _loading(), _plain_record()

    def get_computed_blocks(manager: Any, request: Any) -> Any:
        try:
            step = None if request.num_computed_tokens else manager._kvmend_step
        except AttributeError:  # a manager that was made before the fix came, or a request of somebody's own kind
            step = None
        if step is True:
            logs, manager.log_stats = manager.log_stats, False
            try:
                found = look(manager, request)
            finally:
                manager.log_stats = logs
            try:
                status = request.status
                if logs and (status is waiting or status is preempted) and not request.skip_reading_prefix_cache:
                    # As `keep_in_step` does.
                    before = manager._kvmend_last
                    if before is not None and before.status is loading:
                        settle_load(manager, before, counters)
                    request._kvmend_lookup = found[1]
                    manager._kvmend_last = request
                    counters.held += 1
            except (AttributeError, IndexError):
                pass  # a request of somebody's own kind
            return found
        if step is not None:
            if manager._kvmend_last is None and not open_step(manager, step, plain):
                return get_computed_blocks(manager, request)
            found = look(manager, request)
            manager._kvmend_last = request
            manager._kvmend_hits = found[1]
            return found
        if not manager.log_stats:
            return look(manager, request)
        manager.log_stats = False
        try:
            found = look(manager, request)
        finally:
            manager.log_stats = True
        with contextlib.suppress(AttributeError, IndexError, TypeError):
            if manager.enable_caching and not request.skip_reading_prefix_cache:
                keep(manager, request, found[1])
        return found

    return get_computed_blocks


def _standing_in(
    original: Callable[..., Any], keep: Callable[[Any, Any, Any], None], in_place: bool
) -> Callable[..., Any]:
    """Any lookup: while it runs, a stand-in takes the place of the statistics and keeps what was counted."""

    def get_computed_blocks(manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        stats = manager.prefix_cache_stats
        if stats is None:
            return original(manager, request, *args, **kwargs)
        lookup = manager.prefix_cache_stats = Counted()
        try:
            found = original(manager, request, *args, **kwargs)
        finally:
            manager.prefix_cache_stats = stats
        if lookup.requests and not (in_place and _skips_cache(request)):
            keep(manager, request, lookup)
        return found

    return get_computed_blocks


def _skips_cache(request: Any) -> bool:
    """Prompt log-probabilities need every token computed; 0.8.5 counts such a request though it looks nothing up."""
    return getattr(getattr(request, "sampling_params", None), "prompt_logprobs", None) is not None


def _is_upstreams(original: Callable[..., Any]) -> bool:
    """Whether this is vLLM's own lookup, as far as can be seen: no wrapper, and a request is all it takes.

    One that hides that it wraps has not the name of the method of the class.
    """
    return (
        not hasattr(original, "__wrapped__")
        and getattr(original, "__qualname__", "").split(".")[-2:] == _LOOKUP
        and len(_plain_parameters(original) or ()) == 2
    )


def _plain_parameters(function: Callable[..., Any]) -> list[str] | None:
    """Names of a function's own parameters if each can be given by position and by name; else None."""
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):  # it is not written in Python
        return None
    plain = all(each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for each in parameters)
    return [each.name for each in parameters] if plain else None


def settle_step(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `Scheduler.schedule()`: lookups of requests that it admitted count, the others are dropped."""
    counters, loading = context.counters, _loading()
    plain = _plain_record() if RETURNED in context.shared else None

    def prepare(scheduler: Any, manager: Any) -> Any:
        """Whether requests carry their lookups in the step that is about to begin; None if its end settles none."""
        try:
            by_steps = manager._kvmend_by_steps
        except AttributeError:
            by_steps = meet_late(manager, context, type(scheduler))
        if not (by_steps and manager.enable_caching and getattr(manager, "log_stats", True)):
            return None
        pending = manager._kvmend_pending
        if pending.used:  # probes, or lookups of a loop that was not seen: whoever is admitted here is looked up here
            settle_outside(manager, pending, counters, loading)
        carries = plain is None or goes_on(scheduler)
        if pending.manager() is manager:
            manager._kvmend_carries = carries
        return carries

    def step_of(vllms: Callable[..., Any]) -> Callable[..., Any]:
        """A step, of a function that takes a scheduler, and if the step is told anything, what it is told."""

        def schedule(scheduler: Any, throttle_prefills: Any = _UNTOLD) -> Any:
            manager = scheduler.kv_cache_manager
            try:
                carries = manager._kvmend_carries
            except AttributeError:
                carries = None
            if carries is None and (carries := prepare(scheduler, manager)) is None:
                return vllms(scheduler) if throttle_prefills is _UNTOLD else vllms(scheduler, throttle_prefills)
            last = None
            if carries:
                running = scheduler.running
                last = running[-1] if running else None
                manager._kvmend_step = True
            else:
                manager._kvmend_step = scheduler
            try:
                output = vllms(scheduler) if throttle_prefills is _UNTOLD else vllms(scheduler, throttle_prefills)
            except BaseException:
                abandon_step(manager, counters)
                raise
            step, manager._kvmend_step = manager._kvmend_step, None
            looked_up = manager._kvmend_last
            if step is not True:
                if looked_up is not None:
                    close_step(manager, looked_up, scheduler.running, output, counters)
                return output
            manager._kvmend_last = None
            running = scheduler.running
            if looked_up is not None and looked_up.status is loading:
                settle_load(manager, looked_up, counters)
            # The last one may have been preempted before, and be looked up and the last again.
            again = looked_up is not None and getattr(last, "_kvmend_lookup", None) is not None
            if running and (again or running[-1] is not last):
                settle_admitted(running, last, manager.prefix_cache_stats, counters, plain)
            return output

        return schedule

    # vLLM's own takes nothing, or from 0.25 on one argument.
    takes = _plain_parameters(original)
    as_vllms = takes is not None and takes[1:] in ([], ["throttle_prefills"])
    schedule = step_of(original) if as_vllms else _told_anything(original, step_of)
    setattr(schedule, _ENDS_STEP, True)
    return functools.wraps(original)(schedule)


def _told_anything(
    original: Callable[..., Any], step_of: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """A step that takes whatever it is told, by a way of calling that costs more."""
    step = step_of(lambda scheduler, told: original(scheduler, *told[0], **told[1]))

    def schedule(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        return step(scheduler, (args, kwargs))

    return schedule


def settle_rest(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `KVCacheManager.make_prefix_cache_stats()`: nothing is pending when a step's statistics leave.

    With a loop that was not recognised as one of somebody's own, no step has an end; its lookups are settled here.
    """
    counters, loading = context.counters, _loading()

    @functools.wraps(original)
    def make_prefix_cache_stats(manager: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(manager, "_kvmend_by_steps"):
            meet_late(manager, context, scheduler_above(sys._getframe(1)))
        pending = getattr(manager, "_kvmend_pending", None)
        if isinstance(pending, Pending) and pending.used and manager._kvmend_by_steps:
            settle_outside(manager, pending, counters, loading)
        if getattr(manager, "_kvmend_opened", None) is not None:
            report_in_step(manager, counters)
        inline = getattr(manager, "_kvmend_inline", None)
        if inline is not None:
            inline.drop()
        return original(manager, *args, **kwargs)

    return make_prefix_cache_stats


def _plain_record() -> Any:
    """The method of vLLM's statistics that records, if it is the class's own and nobody's wrapper; else None."""
    statistics = importlib.import_module("vllm.v1.metrics.stats").PrefixCacheStats
    record = getattr(statistics, "record", None)
    own = getattr(record, "__module__", None) == statistics.__module__ and not hasattr(record, "__wrapped__")
    return record if own else None


def _statuses() -> Any:
    return importlib.import_module("vllm.v1.request").RequestStatus


def _loading() -> Any:
    """The status of a request whose KV is loaded asynchronously: admitted, though no token of it may be computed."""
    return getattr(_statuses(), "WAITING_FOR_REMOTE_KVS", object())


def meet_manager(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrapper of `KVCacheManager.__init__`: sees which scheduler makes it, and whether its class bypasses the fix."""

    @functools.wraps(original)
    def __init__(manager: Any, *args: Any, **kwargs: Any) -> None:
        original(manager, *args, **kwargs)
        context.check_shadows(type(manager))
        if INLINE in context.features:
            context.check_shadows(type(manager.coordinator))
        try:
            by_steps = ends_steps(scheduler_above(sys._getframe(1)))
        except Exception:  # code that cannot be looked into must not keep an engine from starting
            context.log.warning("kvmend: the scheduler could not be looked at", exc_info=True)
            by_steps = False
        _meet(manager, context, by_steps)

    return __init__


def meet_late(manager: Any, context: Context, scheduler: type | None) -> bool:
    """Prepares a manager that was made before the fix came; whether the end of a step settles its lookups.

    It may be no manager of vLLM's but somebody's object in the place of one, which takes nothing: then that of vLLM's
    which it may forward to is the one that counts.
    """
    try:
        return _meet(manager, context, ends_steps(scheduler))
    except Exception:  # it must not keep an engine from running
        return False


def _meet(manager: Any, context: Context, by_steps: bool) -> bool:
    inline = INLINE in context.features
    by_steps = by_steps and not (inline and is_looked_up_inline(manager))
    adopt(manager, context, by_steps=by_steps)
    if inline and not by_steps and may_be_looked_up_inline(manager):
        link(manager, context.counters)
    return by_steps


def ends_steps(scheduler: type | None) -> bool:
    """Whether all admissions of a scheduler class are made in vLLM's own `schedule()`, as far as its code tells."""
    if scheduler is None:
        return False
    found = False
    for function, names in reached(scheduler, "schedule"):
        found |= hasattr(function, _ENDS_STEP)
        if "allocate_slots" in names and package_of(function) not in ("vllm", package_of(ends_steps)):
            return False
    return found
