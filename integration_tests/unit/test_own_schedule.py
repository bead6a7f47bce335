"""vllm-prefix-stats-copied-scheduler on small doubles: which schedulers it helps, and what it counts for them."""

from __future__ import annotations

import functools
import gc
import inspect
import random
import weakref
from typing import Any

import pytest

from kvmend_fixes.vllm.copied_scheduler import counts_by_itself
from support.admission_double import OwnLoop, make_rig, make_upstream_scheduler
from support.manager_double import Request

NOTHING = (0, 0, 0)
Upstream = make_upstream_scheduler()


# What is counted ------------------------------------------------------------------------------------------------------


def test_a_loop_of_one_s_own_has_each_admission_counted_once() -> None:
    rig = make_rig()
    for _ in range(5):
        rig.scheduler.schedule(Request())
    assert rig.counts == (5, 500, 300)
    assert rig.counted == {"schedulers": 1, "settled": 5, "left_out": 0}


def test_ten_thousand_refusals_count_nothing_and_the_admission_counts_its_last_lookup() -> None:
    rig, request = make_rig(), Request()
    rig.manager.full = True
    for _ in range(10_000):
        rig.scheduler.schedule(request)
    assert rig.counts == NOTHING
    rig.manager.full, rig.manager.found = False, 48
    rig.scheduler.schedule(request)
    assert rig.counts == (1, 100, 48)


def test_a_lookup_that_serves_a_second_try_at_the_blocks_is_counted_when_that_succeeds() -> None:
    rig, request = make_rig(), Request()
    rig.manager.get_computed_blocks(request)
    rig.manager.full = True
    assert rig.manager.allocate_slots(request, 1, 60) is None
    rig.manager.full = False
    for _ in range(2):
        assert rig.manager.allocate_slots(request, 1, 60) is not None
    assert rig.counts == (1, 100, 60)


def test_a_probe_of_another_request_in_between_changes_nothing() -> None:
    rig, request = make_rig(), Request()
    rig.manager.get_computed_blocks(request)
    rig.manager.get_computed_blocks(Request(num_tokens=1000))
    rig.manager.allocate_slots(request, 1, 60)
    assert rig.counts == (1, 100, 60)


def test_a_probe_of_a_running_request_counts_nothing() -> None:
    rig, request = make_rig(), Request(num_computed_tokens=32)
    rig.manager.get_computed_blocks(request)
    rig.manager.allocate_slots(request, 1)
    assert rig.counts == NOTHING


def test_an_admission_without_a_lookup_counts_nothing() -> None:
    rig = make_rig()
    rig.manager.allocate_slots(Request(), 1)
    assert rig.counts == NOTHING


def test_a_preempted_request_is_counted_again_as_preempted() -> None:
    rig, request = make_rig(), Request()
    rig.scheduler.schedule(request)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    rig.manager.allocate_slots(request, 1)
    assert (rig.counts, rig.preempted) == ((1, 100, 60), NOTHING)
    rig.scheduler.schedule(request)
    assert (rig.counts, rig.preempted) == ((1, 100, 60), (1, 100, 60))


@pytest.mark.parametrize(
    ("adopt", "hits"),
    [
        (lambda manager, request: manager.allocate_slots(request, 1, 48), 48),
        (lambda manager, request: manager.allocate_slots(request, 1, num_new_computed_tokens=48), 48),
        (lambda manager, request: manager.allocate_slots(request, 1, 90), 60),
        (lambda manager, request: manager.allocate_slots(request, 1), 60),
    ],
    ids=["less", "less, by name", "with external hits", "unsaid"],
)
def test_tokens_found_but_not_adopted_are_no_hits(adopt: Any, hits: int) -> None:
    rig, request = make_rig(), Request()
    rig.manager.get_computed_blocks(request)
    adopt(rig.manager, request)
    assert rig.counts == (1, 100, hits)


@pytest.mark.parametrize(("arity", "hits"), [(1, 0), (2, 60), (3, 60), (4, 60)])
def test_lookups_of_any_number_of_values_pass_through_and_count(arity: int, hits: int) -> None:
    rig, request = make_rig(), Request()
    rig.manager.arity = arity
    assert rig.manager.get_computed_blocks(request, limit=5) == ("blocks", 60, 0, "more")[:arity]
    assert rig.manager.allocate_slots(request=request, num_new_tokens=7) == (request, 7, 0, None)
    assert rig.counts == (1, 100, hits)


def test_a_lookup_that_does_not_say_how_many_tokens_it_found_counts_what_is_adopted() -> None:
    rig, request = make_rig(), Request()
    rig.manager.found = None
    rig.manager.get_computed_blocks(request)
    rig.manager.allocate_slots(request, 1, 48)
    assert rig.counts == (1, 100, 48)


def test_the_lookup_for_connectors_is_a_lookup() -> None:
    rig, request = make_rig(), Request()
    assert rig.manager.get_computed_blocks_for_connector(request) == ("blocks per group", 60, 0, True)
    rig.manager.allocate_slots(request, 1, 48)
    assert rig.counts == (1, 100, 48)


def test_with_caching_off_or_a_request_that_may_not_read_the_cache_nothing_is_counted() -> None:
    rig = make_rig(caching=False)
    rig.scheduler.schedule(Request())
    assert (rig.counts, rig.counted["settled"]) == (NOTHING, 0)
    rig = make_rig()
    rig.scheduler.schedule(Request(skip_reading_prefix_cache=True))
    assert (rig.counts, rig.counted["settled"]) == (NOTHING, 0)


def test_with_statistics_off_everything_passes_through() -> None:
    rig, request = make_rig(stats=False), Request()
    assert rig.scheduler.schedule(request) == [request]
    assert (rig.manager.prefix_cache_stats, rig.counted["settled"]) == (None, 0)


# Never twice ----------------------------------------------------------------------------------------------------------


class CountsUnseen(OwnLoop):
    """Calls the manager's counting by a name that its code does not show."""

    early = False

    def schedule(self, *requests: Any) -> list[Any]:
        manager = self.kv_cache_manager
        count = getattr(manager, "_".join(("record", "prefix", "cache", "stats")))
        if self.early:
            for request in requests:
                manager.get_computed_blocks(request)
                count(request, 60)
                manager.allocate_slots(request, 1, 60)
            return list(requests)
        admitted = super().schedule(*requests)
        for request in admitted:
            count(request, 60)
        return admitted


@pytest.mark.parametrize("early", [False, True])
def test_a_scheduler_that_counts_unseen_has_each_admission_counted_once(early: bool) -> None:
    rig = make_rig(CountsUnseen)
    rig.scheduler.early = early
    for _ in range(3):
        rig.scheduler.schedule(Request(), Request())
    assert rig.counts == (6, 600, 360)
    assert rig.counted["settled"] + rig.counted["left_out"] == (0 if early else 12)


class Sometimes(Upstream):  # type: ignore[misc]
    """A loop of its own on some steps, vLLM's on the others."""

    own = True

    def schedule(self, *requests: Any) -> Any:
        if not self.own:
            return super().schedule(*requests)
        for request in requests:
            hits = self.kv_cache_manager.get_computed_blocks(request)[1]
            self.kv_cache_manager.allocate_slots(request, 1, hits)
        return list(requests)


def test_a_scheduler_with_both_loops_has_each_admission_counted_once() -> None:
    rig = make_rig(Sometimes)
    for own in (True, False, False, True):
        rig.scheduler.own = own
        rig.scheduler.schedule(Request())
    assert rig.counts == (4, 400, 240)
    assert rig.counted == {"schedulers": 1, "settled": 4, "left_out": 2}


def test_a_manager_that_counts_its_admissions_itself_is_not_counted_over() -> None:
    rig, request = make_rig(), Request()

    class Counting(type(rig.manager)):  # type: ignore[misc]
        def allocate_slots(self, request: Any, *args: Any) -> Any:
            self.record_prefix_cache_stats(request, 60)
            return super().allocate_slots(request, *args)

    rig.manager.__class__ = Counting
    rig.scheduler.schedule(request)
    assert rig.counts == (1, 100, 60)


def test_random_admissions_of_a_scheduler_with_both_loops_count_what_a_ledger_counts() -> None:
    for seed in range(100):
        chance, rig, ledger = random.Random(seed), make_rig(Sometimes), [0] * 6
        waiting = [Request(num_tokens=chance.randrange(1, 500)) for _ in range(6)]
        for _ in range(150):
            request = chance.choice(waiting)
            rig.manager.full, rig.manager.found = chance.random() < 0.3, chance.randrange(request.num_tokens)
            rig.scheduler.own = chance.random() < 0.5
            if chance.random() < 0.3:
                rig.manager.get_computed_blocks(chance.choice(waiting))
            if request.num_computed_tokens:
                assert (rig.manager.allocate_slots(request, 1) is None) == rig.manager.full
                if chance.random() < 0.5:
                    request.num_computed_tokens, request.num_preemptions = 0, request.num_preemptions + 1
                continue
            rig.scheduler.schedule(request)
            if not rig.manager.full:
                request.run()
                for place, value in enumerate((1, request.num_tokens, rig.manager.found)):
                    ledger[place + 3 * (request.num_preemptions > 0)] += value
        assert [*rig.counts, *rig.preempted] == ledger, seed


# Who is helped --------------------------------------------------------------------------------------------------------


class Inherits(Upstream):  # type: ignore[misc]
    """vLLM's loop, and something of its own beside it."""

    def update_from_output(self, output: Any) -> Any:
        return super().update_from_output(output)


class CallsSuper(Upstream):  # type: ignore[misc]
    """Adds to vLLM's loop."""

    def schedule(self, *requests: Any) -> Any:
        return super().schedule(*sorted(requests, key=id))


class CallsByName(Upstream):  # type: ignore[misc]
    """Adds to vLLM's loop the old way."""

    def schedule(self, *requests: Any) -> Any:
        return Upstream.schedule(self, *requests)


class CallsSuperFromAHelper(Upstream):  # type: ignore[misc]
    """vLLM's loop is two calls away."""

    def schedule(self, *requests: Any) -> Any:
        return self.inner(*requests)

    def inner(self, *requests: Any) -> Any:
        return (lambda: super(CallsSuperFromAHelper, self).schedule(*requests))()


class Counts(OwnLoop):
    """A loop of its own that counts as vLLM's does."""

    def schedule(self, *requests: Any) -> list[Any]:
        for request in requests:
            hits = self.kv_cache_manager.get_computed_blocks(request)[1]
            if self.kv_cache_manager.allocate_slots(request, 1, hits) is not None:
                self.kv_cache_manager.record_prefix_cache_stats(request, hits)
        return list(requests)


class CountsInAHelper(OwnLoop):
    """The same, elsewhere."""

    def schedule(self, *requests: Any) -> list[Any]:
        for request in requests:
            hits = self.kv_cache_manager.get_computed_blocks(request)[1]
            if self.kv_cache_manager.allocate_slots(request, 1, hits) is not None:
                self.admitted(request, hits)
        return list(requests)

    def admitted(self, request: Any, hits: int) -> None:
        self.kv_cache_manager.record_prefix_cache_stats(request, hits)


class CountsPastTheManager(OwnLoop):
    """The same, into the statistics."""

    def schedule(self, *requests: Any) -> list[Any]:
        for request in requests:
            hits = self.kv_cache_manager.get_computed_blocks(request)[1]
            if self.kv_cache_manager.allocate_slots(request, 1, hits) is not None:
                self.kv_cache_manager.prefix_cache_stats.record(request.num_tokens, hits, False)
        return list(requests)


def _patched_scheduler() -> Any:
    """vLLM's scheduler with another plugin's wrapper over its loop."""
    patched = make_upstream_scheduler()
    original = patched.schedule

    @functools.wraps(original)
    def schedule(self: Any, *requests: Any) -> Any:
        return original(self, *requests)

    patched.schedule = schedule
    return patched


@pytest.mark.parametrize(
    "scheduler_class",
    [
        Upstream,
        Inherits,
        CallsSuper,
        CallsByName,
        CallsSuperFromAHelper,
        Counts,
        CountsInAHelper,
        CountsPastTheManager,
        _patched_scheduler(),
    ],
    ids=lambda each: each.__name__,
)
def test_a_scheduler_that_counts_is_left_alone(scheduler_class: Any) -> None:
    rig = make_rig(scheduler_class)
    assert rig.untouched
    rig.scheduler.schedule(Request(), Request())
    assert rig.counts == (2, 200, 120)
    assert rig.counted == {"schedulers": 0, "settled": 0, "left_out": 0}


class OwnInTheMiddle(Upstream):  # type: ignore[misc]
    """Overrides vLLM's loop with one of its own."""

    schedule = OwnLoop.schedule


class BelowIt(OwnInTheMiddle):
    """Adds to a loop that is not vLLM's."""

    def schedule(self, *requests: Any) -> Any:
        return super().schedule(*requests)


class UsesVllmsHelpers(OwnInTheMiddle):
    """Calls other methods of vLLM's scheduler by `super()`."""

    def schedule(self, *requests: Any) -> Any:
        return super().update_from_output(OwnLoop.schedule(self, *requests))  # type: ignore[arg-type]


class CountsConnectorHits(OwnLoop):
    """A copy of an older loop: it counts what a connector finds, and inline what hybrid models find."""

    connector_prefix_cache_stats: Any = None

    def schedule(self, *requests: Any) -> list[Any]:
        if self.connector_prefix_cache_stats is not None:
            manager = self.kv_cache_manager
            manager.coordinator.find_longest_cache_hit_per_group()
            manager.prefix_cache_stats.record(1, 1, False)
            self.connector_prefix_cache_stats.record(1, 1, False)
        return super().schedule(*requests)


@pytest.mark.parametrize("scheduler_class", [OwnLoop, OwnInTheMiddle, BelowIt, UsesVllmsHelpers, CountsConnectorHits])
def test_a_scheduler_that_does_not_count_is_helped(scheduler_class: Any) -> None:
    rig = make_rig(scheduler_class)
    assert not rig.untouched
    rig.scheduler.schedule(Request(), Request())
    assert rig.counts == (2, 200, 120)


def test_a_loop_that_another_plugin_put_into_vllm_s_own_class_is_seen() -> None:
    patched = make_upstream_scheduler()
    assert counts_by_itself(patched)
    patched.schedule = OwnLoop.schedule
    assert not counts_by_itself(patched)


def test_a_manager_that_no_scheduler_makes_is_left_alone() -> None:
    rig = make_rig()
    rig.scheduler.kv_cache_manager = type(rig.manager)()
    assert rig.untouched


def test_a_scheduler_that_cannot_be_looked_at_starts_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(OwnLoop):
        """Its loop is nothing that could be followed."""

    Odd.schedule.__dict__["__wrapped__"] = _Unwilling()  # type: ignore[attr-defined]
    try:
        rig = make_rig(Odd)
    finally:
        del Odd.schedule.__dict__["__wrapped__"]  # type: ignore[attr-defined]
    assert rig.untouched
    assert "could not be looked at" in caplog.text


class _Unwilling:
    def __call__(self) -> None:
        """Nobody calls it."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("not to be asked")


def test_the_manager_that_a_subclass_makes_in_place_of_vllm_s_is_helped() -> None:
    class MakesAnother(OwnLoop):
        def __init__(self, manager_class: Any) -> None:
            super().__init__(manager_class)
            self.kv_cache_manager = self.make(manager_class)

        def make(self, manager_class: Any) -> Any:
            return type("Own", (manager_class,), {})()

    rig = make_rig(MakesAnother)
    rig.scheduler.schedule(Request())
    assert (rig.counts, rig.counted["schedulers"]) == ((1, 100, 60), 2)


# In place and off again -----------------------------------------------------------------------------------------------


def test_taken_off_every_manager_is_as_it_was() -> None:
    rig = make_rig()
    rig.scheduler.schedule(Request())
    for undo in rig.context.on_removal:
        undo()
    assert rig.untouched
    rig.scheduler.schedule(Request())
    assert rig.counts == (1, 100, 60)


def test_taking_it_off_leaves_what_others_put_over_it() -> None:
    rig = make_rig()

    def theirs(request: Any) -> str:
        return "theirs"

    rig.manager.get_computed_blocks = theirs
    for undo in rig.context.on_removal:
        undo()
    assert rig.manager.get_computed_blocks is theirs


def test_a_wrapper_that_comes_later_to_the_class_is_still_called() -> None:
    rig, seen = make_rig(), []
    original = type(rig.manager).allocate_slots

    def allocate_slots(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(args)
        return original(self, *args, **kwargs)

    type(rig.manager).allocate_slots = allocate_slots
    rig.scheduler.schedule(Request())
    assert (len(seen), rig.counts) == (1, (1, 100, 60))


def test_a_dropped_manager_and_a_dropped_request_are_not_kept_alive() -> None:
    rig, request = make_rig(), Request()
    rig.scheduler.schedule(request)
    gone = weakref.ref(rig.manager), weakref.ref(request)
    rig.scheduler = request = None  # type: ignore[assignment]
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    for undo in rig.context.on_removal:
        undo()


def test_the_methods_look_like_those_they_stand_before() -> None:
    manager = make_rig().manager
    assert list(inspect.signature(manager.allocate_slots).parameters)[:2] == ["request", "num_new_tokens"]
    assert manager.get_computed_blocks.__name__ == "get_computed_blocks"
