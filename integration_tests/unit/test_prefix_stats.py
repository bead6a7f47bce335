"""vllm-prefix-stats on a small manager of our own: what is held, what is settled, what is dropped."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import random
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from kvmend_fixes.vllm import _inline_lookups
from support.manager_double import GENERATIONS, Request, Rig, Stats, forget, make_rig

EVERY = pytest.mark.parametrize("generation", GENERATIONS)
AT_THE_LOOKUP = pytest.mark.parametrize("generation", ["in place", "record", "record somehow"])
NOTHING = (0, 0, 0)


def counts(rig: Rig) -> tuple[int, int, int]:
    """What the step's statistics say, once the step hands them out."""
    found: tuple[int, int, int] = rig.manager.make_prefix_cache_stats().counts
    return found


@EVERY
def test_an_admission_counts_its_lookup_once(generation: str) -> None:
    rig = make_rig(generation)
    request = Request()
    rig.lookup(request)
    assert rig.admit(request)
    assert counts(rig) == (1, 100, 60)
    assert counts(rig) == NOTHING
    assert rig.counted == {"held": 1, "settled": 1, "dropped": 0}


@EVERY
def test_a_request_that_is_looked_up_again_counts_its_last_lookup_only(generation: str) -> None:
    rig = make_rig(generation)
    request = Request()
    for hits in (0, 10, 20, 40):
        rig.lookup(request, hits)
    assert rig.admit(request)
    assert counts(rig) == (1, 100, 40)
    assert rig.counted == {"held": 4, "settled": 1, "dropped": 3}


@EVERY
def test_ten_thousand_deferrals_and_an_abort_count_nothing(generation: str) -> None:
    rig = make_rig(generation)
    request, total = Request(), [0, 0, 0]
    for step in range(10_000):
        rig.lookup(request)
        if step % 100 == 0:
            total = [old + new for old, new in zip(total, counts(rig), strict=True)]
    assert total == [0, 0, 0]
    assert counts(rig) == NOTHING
    assert rig.counted == {"held": 10_000, "settled": 0, "dropped": 10_000}


@EVERY
def test_a_failed_allocation_counts_nothing_and_the_admission_after_a_new_lookup_counts_that_one(
    generation: str,
) -> None:
    rig = make_rig(generation)
    request = Request()
    rig.manager.full = True
    rig.lookup(request, 10)
    assert not rig.admit(request)
    assert counts(rig) == NOTHING
    rig.manager.full = False
    rig.lookup(request, 30)
    assert rig.admit(request)
    assert counts(rig) == (1, 100, 30)


@EVERY
def test_an_admission_without_a_lookup_of_its_own_counts_nothing(generation: str) -> None:
    rig = make_rig(generation)
    request = Request()
    rig.manager.full = True
    rig.lookup(request)
    rig.admit(request)
    rig.manager.full = False
    assert rig.admit(request)
    assert counts(rig) == NOTHING


@EVERY
def test_an_admission_without_a_lookup_counts_nothing(generation: str) -> None:
    rig = make_rig(generation)
    assert rig.admit(Request())
    assert counts(rig) == NOTHING


@AT_THE_LOOKUP
def test_a_probe_between_lookup_and_admission_is_not_counted_and_the_admission_is(generation: str) -> None:
    rig = make_rig(generation)
    admitted, probed = Request(num_tokens=100), Request(num_tokens=1000)
    rig.lookup(admitted)
    rig.lookup(probed)
    assert rig.admit(admitted)
    assert counts(rig) == (1, 100, 60)


def test_an_inline_lookup_that_a_probe_came_after_is_dropped() -> None:
    rig = make_rig("inline")
    admitted, probed = Request(num_tokens=100), Request(num_tokens=1000)
    rig.lookup(admitted)
    rig.lookup(probed)
    assert rig.admit(admitted)
    assert rig.admit(probed)
    assert counts(rig) == NOTHING


@EVERY
def test_slots_for_a_running_request_are_nobody_elses_admission(generation: str) -> None:
    rig = make_rig(generation)
    asked, running = Request(), Request(num_computed_tokens=48)
    rig.lookup(asked)
    assert rig.admit(running)
    assert counts(rig) == NOTHING
    assert rig.admit(asked)
    assert counts(rig) == (NOTHING if generation == "inline" else (1, 100, 60))


@EVERY
def test_an_admission_that_no_lookup_led_to_counts_nothing_while_somebody_elses_is_pending(generation: str) -> None:
    rig = make_rig(generation)
    rig.lookup(Request())
    assert rig.admit(Request())
    assert counts(rig) == NOTHING


@EVERY
def test_each_request_is_counted_with_its_own_last_lookup(generation: str) -> None:
    rig = make_rig(generation)
    first, second = Request(num_tokens=10), Request(num_tokens=1000)
    rig.lookup(first, 5)
    rig.lookup(second, 600)
    assert rig.admit(second)
    assert rig.admit(first)
    # Inline lookups are told apart by the scheduler's order alone: the last one is the only one that is known.
    assert counts(rig) == ((1, 1000, 600) if generation == "inline" else (2, 1010, 605))


@EVERY
def test_a_running_request_that_gets_more_slots_counts_nothing(generation: str) -> None:
    rig = make_rig(generation)
    request = Request(num_computed_tokens=32)
    rig.lookup(request)
    for _ in range(3):
        assert rig.manager.allocate_slots(request, 1) is not None
    assert counts(rig) == NOTHING


@EVERY
def test_many_admissions_in_one_step_add_up(generation: str) -> None:
    rig = make_rig(generation)
    for number in range(1, 6):
        request = Request(num_tokens=number * 100)
        rig.lookup(request, number)
        rig.admit(request)
    assert counts(rig) == (5, 1500, 15)


@EVERY
def test_an_admission_in_a_later_step_counts_in_that_step(generation: str) -> None:
    rig = make_rig(generation)
    request = Request()
    rig.lookup(request)
    assert counts(rig) == NOTHING
    rig.lookup(request, 50)
    assert rig.admit(request)
    assert counts(rig) == (1, 100, 50)


@AT_THE_LOOKUP
def test_a_lookup_in_one_step_and_its_admission_in_the_next_count_in_the_next(generation: str) -> None:
    rig = make_rig(generation)
    request = Request()
    rig.lookup(request)
    assert counts(rig) == NOTHING
    assert rig.admit(request)
    assert counts(rig) == (1, 100, 60)


@pytest.mark.parametrize("generation", ["record", "record somehow", "inline"])
def test_a_preempted_request_is_counted_again_as_preempted(generation: str) -> None:
    rig = make_rig(generation)
    request = Request()
    rig.lookup(request)
    rig.admit(request)
    request.preempt()
    rig.lookup(request, 90)
    rig.lookup(request, 80)
    rig.admit(request)
    stats = rig.manager.make_prefix_cache_stats()
    assert (stats.counts, stats.preempted) == ((1, 100, 60), (1, 100, 80))


@EVERY
def test_the_statistics_object_that_others_hold_stays_the_same_within_a_step(generation: str) -> None:
    rig = make_rig(generation)
    held: Stats = rig.manager.prefix_cache_stats
    for _ in range(3):
        request = Request()
        rig.lookup(request)
        assert rig.manager.prefix_cache_stats is held
        rig.admit(request)
        assert rig.manager.prefix_cache_stats is held
    assert held.counts == (3, 300, 180)
    assert rig.manager.make_prefix_cache_stats() is held
    assert rig.manager.prefix_cache_stats is not held


@EVERY
def test_the_reset_flag_passes_through(generation: str) -> None:
    rig = make_rig(generation)
    rig.lookup(Request())
    rig.manager.reset_prefix_cache()
    rig.lookup(Request())
    assert rig.manager.make_prefix_cache_stats().reset
    assert not rig.manager.make_prefix_cache_stats().reset


@EVERY
def test_with_statistics_off_everything_passes_through(generation: str) -> None:
    rig = make_rig(generation, stats=False)
    request = Request()
    rig.lookup(request)
    assert rig.manager.get_computed_blocks(request) == ("blocks", 60)
    assert rig.admit(request)
    assert rig.manager.prefix_cache_stats is rig.manager.make_prefix_cache_stats() is None
    assert rig.counted == {"held": 0, "settled": 0, "dropped": 0}


@EVERY
def test_with_caching_off_nothing_is_counted(generation: str) -> None:
    rig = make_rig(generation, caching=False)
    request = Request()
    rig.lookup(request)
    assert rig.admit(request)
    assert counts(rig) == NOTHING


@EVERY
def test_a_request_that_may_not_read_the_cache_is_not_counted(generation: str) -> None:
    rig = make_rig(generation)
    request = Request(skip_reading_prefix_cache=True, sampling_params=SimpleNamespace(prompt_logprobs=1))
    rig.lookup(request, 0)
    assert rig.admit(request)
    assert counts(rig) == NOTHING


@AT_THE_LOOKUP
@pytest.mark.parametrize("arity", [1, 2, 3, 4])
def test_return_values_of_any_number_pass_through(generation: str, arity: int) -> None:
    rig = make_rig(generation, arity=arity)
    rig.manager.found = 7
    assert rig.manager.get_computed_blocks(Request()) == ("blocks", 7, "more", "still more")[:arity]


@EVERY
def test_arguments_and_results_of_an_allocation_pass_through_pending_or_not(generation: str) -> None:
    rig = make_rig(generation)
    request = Request()
    for _ in range(2):
        assert rig.manager.allocate_slots(request, 5) == (request, 5, 4)
        assert rig.manager.allocate_slots(request, num_new_tokens=5, num_lookahead=0) == (request, 5, 0)
        assert rig.manager.allocate_slots(request=request, num_new_tokens=5) == (request, 5, 4)
        rig.lookup(request)
    with pytest.raises(TypeError):
        rig.manager.allocate_slots(request)


@AT_THE_LOOKUP
def test_a_lookup_that_raises_puts_the_statistics_back_and_counts_nothing(generation: str) -> None:
    rig = make_rig(generation)
    held, request = rig.manager.prefix_cache_stats, Request()
    rig.manager.broken = True
    with pytest.raises(LookupError):
        rig.lookup(request)
    assert rig.manager.prefix_cache_stats is held
    rig.admit(request)
    assert counts(rig) == NOTHING


def probing(method: Any) -> Any:
    """Somebody else's wrapper with the method's own parameters, that looks up another request at each call."""

    def probes(manager: Any, request: Any, *more: Any) -> Any:
        if manager.probed is not None:
            manager.probed, probed = None, manager.probed
            manager.get_computed_blocks(probed)
        return method(manager, request, *more)

    with_parameters: dict[str, Any] = {"probes": probes}
    names = [*inspect.signature(method).parameters][2:]
    listed = "".join(f", {name}=0" for name in names)
    exec(f"def probing(manager, request{listed}): return probes(manager, request, {', '.join(names)})", with_parameters)
    return functools.wraps(method)(with_parameters["probing"])


@AT_THE_LOOKUP
@pytest.mark.parametrize("method", ["get_computed_blocks", "allocate_slots"])
def test_what_somebody_elses_wrapper_beneath_looks_up_is_not_taken_for_the_requests_own(
    generation: str, method: str
) -> None:
    rig = make_rig(generation, beneath={method: probing})
    request = Request()
    rig.manager.probed = Request(num_tokens=1000) if method == "get_computed_blocks" else None
    rig.lookup(request)
    if method == "allocate_slots":
        rig.manager.probed = Request(num_tokens=1000)
    assert rig.admit(request)
    assert rig.manager.probed is None
    assert counts(rig) == (1, 100, 60)


@EVERY
def test_statistics_that_are_switched_off_between_lookup_and_admission_cost_the_count_and_not_the_engine(
    generation: str,
) -> None:
    rig = make_rig(generation)
    request = Request()
    rig.lookup(request)
    rig.manager.prefix_cache_stats = None
    assert rig.admit(request)
    assert rig.counted["settled"] == 0


@AT_THE_LOOKUP
def test_a_probe_with_a_request_of_ones_own_kind_passes_through_and_counts_nothing(generation: str) -> None:
    class Bare:
        """What a lookup reads of a request, and no room for more."""

        __slots__ = ("num_preemptions", "num_tokens", "skip_reading_prefix_cache")

        @property
        def preempted(self) -> bool:
            return False

    rig, bare = make_rig(generation), Bare()
    bare.num_tokens, bare.num_preemptions, bare.skip_reading_prefix_cache = 100, 0, False
    assert rig.manager.get_computed_blocks(bare) == ("blocks", 0)
    assert counts(rig) == NOTHING
    request = Request()
    rig.lookup(request)
    assert rig.admit(request)
    assert counts(rig) == (1, 100, 60)


@AT_THE_LOOKUP
def test_a_probe_of_a_running_request_is_replaced_by_the_lookup_after_its_preemption(generation: str) -> None:
    rig = make_rig(generation)
    request = Request(num_computed_tokens=32)
    rig.lookup(request, 10)
    assert rig.admit(request)
    request.wait_again()
    rig.lookup(request, 30)
    assert rig.admit(request)
    assert counts(rig) == (1, 100, 30)


@EVERY
@pytest.mark.parametrize("full", [False, True])
def test_a_report_in_the_middle_of_an_admission_does_not_take_a_held_lookup_back(generation: str, full: bool) -> None:
    """Catches a counter that falls by one for a moment, which Prometheus takes for a restart."""
    rig, told = make_rig(generation), []
    rig.manager.during, rig.manager.full = lambda: told.append(rig.counted["held"]), full
    for _ in range(3):
        request = Request()
        rig.lookup(request)
        told.append(rig.counted["held"])
        rig.admit(request)
        told.append(rig.counted["held"])
    assert told == sorted(told)
    assert told[-1] == 3


@AT_THE_LOOKUP
def test_admissions_in_the_reverse_order_of_their_lookups_count(generation: str) -> None:
    rig = make_rig(generation)
    for round_ in range(1, 20):
        requests = [Request() for _ in range(40)]
        for request in requests:
            rig.lookup(request)
        for request in reversed(requests):
            assert rig.admit(request)
        assert counts(rig) == (40, 40 * 100, 40 * 60)
        assert rig.counted == {"held": 40 * round_, "settled": 40 * round_, "dropped": 0}


def test_lookups_that_record_nothing_take_no_place_and_find_nothing_of_an_earlier_one() -> None:
    rig = make_rig("record")
    request, silent = Request(), Request(num_tokens=7, skip_reading_prefix_cache=True)
    for _ in range(40):
        rig.lookup(Request(num_tokens=1000))
    rig.lookup(request)
    for _ in range(40):
        rig.lookup(silent)
    assert rig.admit(silent)
    assert rig.admit(request)
    assert counts(rig) == (1, 100, 60)


@EVERY
def test_held_lookups_of_managers_that_are_gone_stay_counted(generation: str) -> None:
    one = make_rig(generation)
    two = Rig(manager=type(one.manager)(), counters=one.counters, generation=generation)
    for rig in (one, two):
        for _ in range(35):
            rig.lookup(Request())
        counts(rig)
    one.manager = None
    gc.collect()
    assert two.counted == {"held": 70, "settled": 0, "dropped": 70}


@EVERY
def test_a_forked_child_counts_from_zero(generation: str) -> None:
    rig = make_rig(generation)
    for _ in range(35):
        rig.lookup(Request())
    counts(rig)
    rig.counters.reset()
    assert rig.counted == {"held": 0, "settled": 0, "dropped": 0}
    request = Request()
    rig.lookup(request)
    rig.lookup(request)
    rig.admit(request)
    assert rig.counted == {"held": 2, "settled": 1, "dropped": 1}


@EVERY
def test_a_manager_can_be_copied_and_sent_elsewhere_and_starts_there_without_a_lookup(generation: str) -> None:
    rig = make_rig(generation)
    request = Request()
    rig.manager.get_computed_blocks(request)
    for pending in (
        copy.deepcopy(rig.manager._kvmend_pending),
        pickle.loads(pickle.dumps(rig.manager._kvmend_pending)),
    ):
        rig.manager._kvmend_pending = pending
        assert rig.admit(request)
        request.wait_again()
        rig.lookup(request)
        assert rig.admit(request)
        request.wait_again()
    assert counts(rig) == (2, 200, 120)


def test_the_wrappers_look_like_what_they_wrap() -> None:
    manager = type(make_rig("record").manager)
    assert manager.allocate_slots.__name__ == "allocate_slots"
    assert list(inspect.signature(manager.allocate_slots).parameters) == [
        "self",
        "request",
        "num_new_tokens",
        "num_lookahead",
    ]
    assert manager.get_computed_blocks.__doc__ is manager.get_computed_blocks.__wrapped__.__doc__


@EVERY
def test_two_managers_do_not_know_of_each_others_lookups(generation: str) -> None:
    one = make_rig(generation)
    two = Rig(manager=type(one.manager)(), counters=one.counters, generation=generation)
    request = Request()
    one.lookup(request)
    two.admit(request)
    request.wait_again()
    assert one.admit(request)
    assert (counts(one), counts(two)) == ((1, 100, 60), NOTHING)


@EVERY
def test_a_dropped_request_and_a_dropped_manager_are_not_kept_alive_by_the_fix(generation: str) -> None:
    rig = make_rig(generation)
    request: Any = Request()
    rig.lookup(request)
    gone = weakref.ref(request)
    rig.lookup(Request())
    del request
    assert gone() is None
    manager = weakref.ref(rig.manager)
    rig.manager = None
    gc.collect()
    assert manager() is None


# A manager that was made before the fix came has a coordinator that does not know it --------------------------------


def test_a_manager_older_than_the_fix_is_known_from_its_first_step_on() -> None:
    rig = make_rig("inline")
    del _inline_lookups._managers[rig.manager.coordinator]
    forget(rig.manager)
    rig.manager.make_prefix_cache_stats()
    rig.lookup(Request())
    assert counts(rig) == NOTHING


def test_inline_and_plain_lookups_do_not_get_in_each_others_way() -> None:
    rig = make_rig("inline")
    inline, plain = Request(num_tokens=10), Request(num_tokens=1000)
    rig.lookup(inline, 5)
    rig.manager.found = 600
    rig.manager.get_computed_blocks(plain)
    assert rig.admit(plain)
    assert counts(rig) == (1, 1000, 600)
    again = Request(num_tokens=2000)
    rig.manager.get_computed_blocks(again)
    rig.lookup(inline, 5)
    inline.wait_again()
    assert rig.admit(inline)
    assert rig.admit(again)
    assert counts(rig) == (2, 2010, 605)


def test_an_inline_lookup_that_records_nothing_is_not_counted_as_held() -> None:
    rig = make_rig("inline")
    request = Request()
    rig.manager.coordinator.find_longest_cache_hit_per_group(request.block_hashes, 1)
    assert rig.admit(request)
    assert counts(rig) == NOTHING
    assert rig.counted == {"held": 0, "settled": 0, "dropped": 0}


@EVERY
def test_random_sequences_count_what_a_ledger_counts(generation: str) -> None:
    for seed in range(60):
        chance, rig, ledger, total = random.Random(seed), make_rig(generation), [0] * 6, [0] * 6
        pending: dict[int, tuple[int, bool]] = {}
        waiting = [Request(num_tokens=chance.randrange(1, 500)) for _ in range(6)]
        for _ in range(120):
            request = chance.choice(waiting)
            action = chance.choice(("lookup", "lookup and admit", "lookup and admit", "admit", "step", "preempt"))
            rig.manager.full = chance.random() < 0.3
            fresh = request.num_computed_tokens == 0
            if action.startswith("lookup"):
                hits = chance.randrange(request.num_tokens + 1)
                rig.lookup(request, hits)
                if generation == "inline":  # one is known at a time
                    pending = {}
                if fresh or generation == "inline":
                    pending[id(request)] = hits, request.preempted and generation != "in place"
            if action.endswith("admit") and fresh:
                own = pending.pop(id(request), None)
                if rig.admit(request) and own is not None:
                    hits, preempted = own
                    place = 3 if preempted else 0
                    for offset, value in enumerate((1, request.num_tokens, hits)):
                        ledger[place + offset] += value
                if generation == "inline":
                    pending = {}
            elif action == "admit":
                rig.admit(request)
            if action == "step":
                stats = rig.manager.make_prefix_cache_stats()
                total = [old + new for old, new in zip(total, (*stats.counts, *stats.preempted), strict=True)]
                pending = {} if generation == "inline" else pending
            if action == "preempt" and not fresh:
                request.preempt()
        stats = rig.manager.make_prefix_cache_stats()
        total = [old + new for old, new in zip(total, (*stats.counts, *stats.preempted), strict=True)]
        assert total == ledger, seed
        assert rig.counted["settled"] == ledger[0] + ledger[3]
