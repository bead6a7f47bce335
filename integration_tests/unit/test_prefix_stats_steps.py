"""vllm-prefix-stats with vLLM's own `schedule()`, here a double of it: lookups are settled when a step ends."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvmend.api import Context, Counters
from kvmend_fixes.vllm._lookup_holds import ends_steps, settle_step
from kvmend_fixes.vllm._settling import adopt
from kvmend_fixes.vllm.prefix_stats import FIX
from support.manager_double import ALONE, Request, RequestStatus, Rig, Stats, forget, make_rig, stand_ins

CONNECTED = pytest.mark.parametrize("generation", ["in place", "record", "record somehow"])
EVERY = pytest.mark.parametrize("generation", ["in place", "record", ALONE, "record somehow"])
NOTHING = (0, 0, 0)


def make(generation: str, **options: Any) -> Rig:
    """A manager that vLLM's own scheduler makes, or one of another class."""
    made = options.pop("scheduler_class", lambda upstream: upstream)
    return make_rig(generation, scheduler=lambda upstream, manager: made(upstream)(manager), **options)


def counts(rig: Rig) -> tuple[int, int, int]:
    found: tuple[int, int, int] = rig.manager.prefix_cache_stats.counts
    return found


def taken(rig: Rig) -> tuple[int, ...]:
    """What the step's statistics say, once they are handed out."""
    stats = rig.manager.make_prefix_cache_stats()
    return (*stats.counts, *stats.preempted)


def allocates_as_released(rig: Rig) -> bool:
    return "allocate_slots" not in vars(rig.manager)


@EVERY
def test_an_admission_counts_once_by_the_end_of_its_step_and_nothing_is_over_the_allocation(generation: str) -> None:
    rig, request = make(generation), Request()
    rig.manager.found = 60
    for _ in range(5):
        assert rig.scheduler.schedule([request]) == []
        assert counts(rig) == NOTHING
    assert rig.scheduler.schedule([request], admit=[request]) == [request]
    assert counts(rig) == (1, 100, 60)
    rig.scheduler.schedule([request], admit=[request])
    assert taken(rig) == (1, 100, 60, 0, 0, 0)
    assert rig.counted == {"held": 6, "settled": 1, "dropped": 5}
    assert allocates_as_released(rig)


@EVERY
def test_in_a_step_with_all_sorts_only_the_admissions_count(generation: str) -> None:
    rig = make(generation)
    rig.manager.found = 4
    waiting = [Request(num_tokens=tokens) for tokens in (10, 20, 40, 80, 160)]
    loads = () if generation == ALONE else waiting[::4]
    rig.scheduler.schedule(waiting, admit=waiting[1:4:2], load=loads)
    assert counts(rig) == ((4, 270, 16) if loads else (2, 100, 8))


@EVERY
def test_a_refused_allocation_counts_nothing(generation: str) -> None:
    rig, request = make(generation), Request()
    rig.manager.full = True
    for _ in range(3):
        rig.scheduler.schedule([request], admit=[request])
    rig.manager.full = False
    assert counts(rig) == NOTHING
    rig.scheduler.schedule([request], admit=[request])
    assert counts(rig) == (1, 100, 0)


@CONNECTED
def test_an_asynchronous_load_counts_when_it_begins_and_not_when_the_rest_is_computed(generation: str) -> None:
    """Early releases give such a request no computed tokens before it is loaded."""
    rig, request = make(generation), Request()
    rig.scheduler.schedule([request], load=[request])
    assert counts(rig) == (1, 100, 0)
    request.status, request.num_computed_tokens = RequestStatus.WAITING, 64
    rig.scheduler.schedule([Request(), request], admit=[request])
    assert counts(rig) == (1, 100, 0)


@CONNECTED
def test_an_asynchronous_load_with_a_probe_before_it_counts_when_the_request_runs(generation: str) -> None:
    """By a connector, say, that looks for another request before it answers."""
    rig, request, stranger = make(generation), Request(), Request(num_tokens=1000)

    def probe(_: Request) -> None:
        if request.status is RequestStatus.WAITING:
            rig.manager.get_computed_blocks(stranger)

    rig.scheduler.during = probe
    rig.scheduler.schedule([request, stranger], load=[request])
    request.status, request.num_computed_tokens = RequestStatus.WAITING, 64
    rig.scheduler.during = lambda _: None
    rig.scheduler.schedule([request], admit=[request])
    assert counts(rig) == (1, 100, 0)


@pytest.mark.parametrize("generation", ["record", ALONE, "record somehow"])
def test_a_preempted_request_is_counted_again_as_preempted_when_it_is_resumed(generation: str) -> None:
    rig, request = make(generation), Request()
    rig.scheduler.schedule([request], admit=[request])
    request.preempt()
    for _ in range(3):
        rig.scheduler.schedule([request])
    rig.manager.found = 80
    rig.scheduler.schedule([request], admit=[request])
    assert taken(rig) == (1, 100, 0, 1, 100, 80)


@EVERY
@pytest.mark.parametrize("status", [RequestStatus.RUNNING, RequestStatus.WAITING])
def test_a_probe_of_a_request_that_has_computed_tokens_counts_nothing(generation: str, status: RequestStatus) -> None:
    rig, request = make(generation), Request(num_computed_tokens=32, status=status)
    rig.scheduler.during = lambda _: rig.manager.get_computed_blocks(request)
    rig.scheduler.schedule([request], admit=[request])
    assert counts(rig) == NOTHING


@EVERY
def test_a_probe_after_the_admission_does_not_change_what_is_counted(generation: str) -> None:
    """Catches the hits of its own blocks: they are cached by then, and it may have no computed token yet."""
    rig, request = make(generation), Request()

    def probe(_: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            rig.manager.found = 96
            rig.manager.get_computed_blocks(request)

    rig.scheduler.during = probe
    rig.scheduler.schedule([request], admit=[request])
    assert rig.manager.found == 96
    assert counts(rig) == (1, 100, 0)


@EVERY
def test_probes_before_the_lookup_do_not_change_what_is_counted(generation: str) -> None:
    """As of a plugin that sorts the queue by what is cached, before the step or in it."""
    rig, first, second = make(generation), Request(), Request(num_tokens=200)

    def probe(request: Request) -> None:
        if request is first:
            rig.manager.found = 0
            rig.manager.get_computed_blocks(second)
            rig.manager.found = 60

    probe(first)
    rig.scheduler.during = probe
    rig.scheduler.schedule([first, second], admit=[second])
    assert counts(rig) == (1, 200, 60)


@EVERY
@pytest.mark.parametrize("deferrals", [0, 2])
def test_a_probe_of_another_request_between_each_lookup_and_its_admission_changes_nothing(
    generation: str, deferrals: int
) -> None:
    """As by somebody's wrapper of the allocation. Deferred or not before, each admission counts, and once."""
    rig, stranger = make(generation), Request(num_tokens=1000)
    waiting = [Request(num_tokens=tokens) for tokens in (10, 20, 40)]
    rig.manager.found = 4
    for _ in range(deferrals):
        rig.scheduler.schedule(waiting)
    rig.scheduler.during = lambda _: rig.manager.get_computed_blocks(stranger)
    rig.scheduler.schedule(waiting, admit=waiting[:2])
    assert counts(rig) == (2, 30, 8)
    rig.scheduler.schedule(waiting[2:], admit=waiting[2:])
    assert counts(rig) == (3, 70, 12)


class TheirRequest:
    """A request of somebody's own kind that has room for nothing more."""

    __slots__ = ("num_computed_tokens", "num_preemptions", "num_tokens", "skip_reading_prefix_cache", "status")
    preempted = False

    def __init__(self, status: RequestStatus) -> None:
        self.num_tokens, self.num_computed_tokens, self.num_preemptions = 1000, 0, 0
        self.skip_reading_prefix_cache, self.status = False, status


@EVERY
@pytest.mark.parametrize("last", [False, True])
def test_a_probe_with_a_request_of_ones_own_kind_costs_nobody_s_count(generation: str, last: bool) -> None:
    rig, first, second = make(generation), Request(), Request(num_tokens=200)

    def probe(request: Request) -> None:
        if request is (second if last else first):
            rig.manager.get_computed_blocks(TheirRequest(request.status))

    rig.scheduler.during = probe
    for _ in range(2):
        rig.scheduler.schedule([first, second])
    rig.scheduler.schedule([first, second], admit=[first, second])
    assert counts(rig) == (2, 300, 0)


@EVERY
def test_an_admission_counts_once_though_others_in_its_step_were_looked_up_out_of_turn(generation: str) -> None:
    """Catches what a request carries from a probe that came before its own turn."""
    rig, first, second, stranger = make(generation), Request(), Request(num_tokens=200), Request()

    def probe(request: Request) -> None:
        if request is first and first.status is RequestStatus.WAITING:
            rig.manager.get_computed_blocks(second)
            rig.manager.get_computed_blocks(stranger)

    rig.scheduler.during = probe
    rig.scheduler.schedule([first, second], admit=[first, second])
    assert counts(rig) == (2, 300, 0)


@EVERY
def test_who_runs_again_without_a_lookup_is_not_counted_for_an_earlier_one(generation: str) -> None:
    """As a request whose session got more input. It was deferred once, and carried what was looked up then."""
    rig, request = make(generation), Request()
    rig.scheduler.schedule([request])
    rig.scheduler.schedule([request], admit=[request])
    request.status = RequestStatus.WAITING
    rig.scheduler.schedule([Request()])
    rig.scheduler.schedule([Request(), request], admit=[request])
    assert counts(rig) == (1, 100, 0)


@CONNECTED
def test_a_deferred_request_whose_load_comes_later_is_counted_once(generation: str) -> None:
    rig, request = make(generation), Request()
    rig.scheduler.schedule([request])
    rig.scheduler.schedule([request], load=[request])
    request.status, request.num_computed_tokens = RequestStatus.WAITING, 64
    rig.scheduler.schedule([request], admit=[request])
    assert counts(rig) == (1, 100, 0)


@EVERY
def test_a_probe_outside_a_step_whose_request_is_aborted_counts_nothing(generation: str) -> None:
    rig, probed, stranger = make(generation), Request(), Request()
    rig.manager.get_computed_blocks(probed)
    rig.manager.get_computed_blocks(stranger)
    probed.status = RequestStatus.FINISHED_ABORTED
    rig.scheduler.schedule([])
    assert taken(rig) == (0,) * 6
    assert rig.counted == {"held": 2, "settled": 0, "dropped": 2}


@EVERY
def test_a_probe_of_a_request_that_is_being_loaded_counts_nothing(generation: str) -> None:
    rig, request = make(generation), Request(status=RequestStatus.WAITING_FOR_REMOTE_KVS)
    rig.manager.get_computed_blocks(request)
    rig.scheduler.schedule([])
    assert taken(rig) == (0,) * 6


@EVERY
def test_with_caching_off_or_statistics_off_nothing_is_counted(generation: str) -> None:
    for options in ({"caching": False}, {"stats": False}):
        rig, request = make(generation, **options), Request()
        rig.scheduler.schedule([request], admit=[request])
        assert rig.manager.prefix_cache_stats is None or counts(rig) == NOTHING
        assert rig.counted == {"held": 0, "settled": 0, "dropped": 0}


@EVERY
def test_statistics_that_are_switched_off_in_a_step_cost_the_count_and_not_the_engine(generation: str) -> None:
    rig, request = make(generation), Request()

    def switch_off(_: Request) -> None:
        rig.manager.prefix_cache_stats = None

    rig.scheduler.during = switch_off
    assert rig.scheduler.schedule([request], admit=[request]) == [request]
    assert rig.counted == {"held": 1, "settled": 0, "dropped": 1}


@EVERY
def test_a_lookup_that_raises_leaves_the_statistics_as_they_were_and_on(generation: str) -> None:
    rig, request = make(generation), Request()
    held, rig.manager.broken = rig.manager.prefix_cache_stats, True
    with pytest.raises(LookupError):
        rig.scheduler.schedule([request])
    assert rig.manager.prefix_cache_stats is held
    assert rig.manager.log_stats
    rig.manager.broken = False
    rig.scheduler.schedule([request], admit=[request])
    assert counts(rig) == (1, 100, 0)


@EVERY
@pytest.mark.parametrize("raises", [False, True])
def test_no_request_is_kept_alive_beyond_its_step(generation: str, raises: bool) -> None:
    rig = make(generation)
    request: Any = Request()
    rig.manager.found = 60

    def fail(_: Request) -> None:
        raise LookupError("in the step")

    if raises:
        rig.scheduler.during = fail
    with pytest.raises(LookupError, match="in the step") if raises else contextlib.nullcontext():
        rig.scheduler.schedule([request])
    gone = weakref.ref(request)
    del request
    gc.collect()
    assert gone() is None


@EVERY
def test_a_request_that_ran_is_not_kept_alive_by_the_steps_after_it(generation: str) -> None:
    rig = make(generation)
    request: Any = Request()
    rig.scheduler.schedule([request], admit=[request])
    rig.scheduler.schedule([Request()])
    rig.scheduler.ran.clear()
    gone = weakref.ref(request)
    del request
    gc.collect()
    assert gone() is None


@EVERY
def test_no_number_of_probes_on_an_idle_server_keeps_anything_alive(generation: str) -> None:
    rig = make(generation)
    gone = []
    for _ in range(100):
        stranger: Any = Request()
        rig.manager.get_computed_blocks(stranger)
        gone.append(weakref.ref(stranger))
    del stranger
    gc.collect()
    assert not any(each() is not None for each in gone)
    assert rig.counted == {"held": 100, "settled": 0, "dropped": 100}


@EVERY
@pytest.mark.parametrize("first", ["a step", "a probe", "statistics"])
def test_a_step_of_a_manager_older_than_the_fix_counts(generation: str, first: str) -> None:
    rig, request = make(generation), Request()
    forget(rig.manager)
    if first == "a probe":
        rig.manager.get_computed_blocks(Request())
    if first == "statistics":
        assert taken(rig) == (0,) * 6
    rig.scheduler.schedule([request])
    rig.scheduler.schedule([request], admit=[request])
    assert counts(rig) == (1, 100, 0)


@EVERY
def test_a_step_with_something_else_in_the_place_of_the_manager_runs_as_released(generation: str) -> None:
    class Theirs:
        """Of no class of vLLM's, and with no room for attributes."""

        __slots__ = ()

        def get_computed_blocks(self, request: Request) -> tuple[str, int]:
            return "blocks", 0

        def allocate_slots(self, request: Request, num_new_tokens: int) -> str:
            return "blocks"

    rig, request = make(generation), Request()
    rig.scheduler.kv_cache_manager = Theirs()
    assert rig.scheduler.schedule([request], admit=[request]) == [request]
    assert rig.counted == {"held": 0, "settled": 0, "dropped": 0}


@EVERY
def test_where_no_step_ends_lookups_are_settled_when_the_statistics_are_taken(generation: str) -> None:
    """A loop that was not seen to be one of its own, because it is in no code that can be looked into."""
    rig = make(generation)
    waits, runs, loads = Request(), Request(), Request()
    for request in (waits, runs, loads):
        rig.manager.get_computed_blocks(request)
        rig.manager.allocate_slots(request, 16)
    runs.num_computed_tokens, runs.status = 100, RequestStatus.RUNNING
    loads.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    assert taken(rig)[:3] == (2, 200, 0)
    assert taken(rig)[:3] == NOTHING
    assert rig.counted == {"held": 3, "settled": 2, "dropped": 1}


# Steps without a connector, whose lookups count at once -------------------------------------------------------------


def test_a_step_without_a_connector_leaves_nothing_on_its_requests_and_records_as_released() -> None:
    """Catches work for each request where it can be done for the step as a whole."""
    rig, requests = make(ALONE), [Request(), Request()]
    seen = []
    rig.scheduler.during = lambda _: seen.append(counts(rig))
    rig.scheduler.schedule(requests, admit=requests)
    assert seen == [(1, 100, 0), (1, 100, 0), (2, 200, 0), (2, 200, 0)]
    assert not any(name.startswith("_kvmend_") for each in requests for name in vars(each))


@pytest.mark.parametrize("name", ["connector", "ec_connector"])
def test_with_a_connector_of_either_kind_nothing_counts_before_the_step_ends(name: str) -> None:
    """Both let the loop go on after a lookup that led to nothing. One may come after the first step."""
    rig, requests = make(ALONE), [Request(), Request()]
    if name == "connector":
        rig.scheduler.schedule([Request()])
    setattr(rig.scheduler, name, "a connector")
    seen = []
    rig.scheduler.during = lambda _: seen.append(counts(rig))
    rig.scheduler.schedule(requests, admit=requests[1:])
    assert set(seen) == {NOTHING}
    assert counts(rig) == (1, 100, 0)


@pytest.mark.parametrize("preempted", [False, True])
def test_the_last_lookup_of_a_step_is_taken_back_if_it_led_to_nothing(preempted: bool) -> None:
    rig, first, last = make(ALONE), Request(), Request(num_tokens=200)
    if preempted:
        rig.scheduler.schedule([last], admit=[last])
        last.preempt()
        taken(rig)
    rig.manager.found = 60
    rig.scheduler.schedule([first, last], admit=[first])
    assert taken(rig) == (1, 100, 60, 0, 0, 0)
    rig.scheduler.schedule([last], admit=[last])
    assert taken(rig) == ((0, 0, 0, 1, 200, 60) if preempted else (1, 200, 60, 0, 0, 0))


@pytest.mark.parametrize("admitted", [False, True])
def test_a_request_that_may_not_read_the_cache_does_not_hide_a_lookup_that_led_to_nothing(admitted: bool) -> None:
    """Its admission is one more, and its lookup none: as many lookups as admissions, and one of them is to go."""
    rig, silent = make(ALONE), Request(skip_reading_prefix_cache=True)
    waits = Request(num_tokens=200)
    rig.scheduler.schedule([silent, waits], admit=[silent] if admitted else [])
    assert counts(rig) == NOTHING
    rig.scheduler.schedule([waits, silent], admit=[waits])
    assert counts(rig) == (1, 200, 0)


@pytest.mark.parametrize("last", [False, True])
def test_a_session_that_runs_again_does_not_hide_a_lookup_that_led_to_nothing(last: bool) -> None:
    rig, session, waits = make(ALONE), Request(num_computed_tokens=64), Request(num_tokens=200)
    rig.scheduler.schedule([waits, session] if last else [session, waits], admit=[session])
    assert counts(rig) == NOTHING
    assert rig.counted == {"held": 1, "settled": 0, "dropped": 1}


def test_an_admission_counts_though_a_session_runs_again_after_it() -> None:
    """Catches who is taken for one that waits because it is not the last of those that run."""
    rig, first, new = make(ALONE), Request(), Request(num_tokens=200)
    rig.scheduler.schedule([first], admit=[first])
    session = Request(num_computed_tokens=64)
    rig.scheduler.schedule([new, session], admit=[new, session])
    assert counts(rig) == (2, 300, 0)


@pytest.mark.parametrize("name", ["enable_chunked_prefill", "chunked_prefill_enabled"])
def test_a_loop_that_goes_on_after_a_refusal_counts_its_admissions(name: str) -> None:
    """As that of 0.11.1 with chunked prefill off, where a prompt beyond the budget is passed over."""
    rig, silent = make(ALONE), Request(skip_reading_prefix_cache=True)
    rig.scheduler.scheduler_config = SimpleNamespace(**{name: False})
    refused, admitted = Request(num_tokens=200), Request(num_tokens=20)
    rig.manager.found = 4
    rig.scheduler.schedule([refused, admitted, silent], admit=[admitted, silent])
    assert counts(rig) == (1, 20, 4)


@pytest.mark.parametrize("generation", ["record", ALONE, "record somehow"])
def test_statistics_that_somebody_switches_off_for_good_stay_off(generation: str) -> None:
    rig = make(generation)
    rig.scheduler.schedule([Request()])
    before = rig.counted["settled"]
    rig.manager.log_stats, rig.manager.prefix_cache_stats = False, None
    request = Request()
    rig.scheduler.schedule([request])
    rig.scheduler.schedule([request], admit=[request])
    assert rig.manager.log_stats is False
    assert rig.counted["settled"] == before


def test_probes_in_the_middle_of_a_step_are_taken_back_and_admissions_keep_their_own_hits() -> None:
    rig, requests = make(ALONE), [Request(num_tokens=tokens) for tokens in (10, 20, 40)]
    strangers = [Request(num_tokens=1000) for _ in range(3)]

    def probe(request: Request) -> None:
        rig.manager.found = 9
        for each in strangers:
            rig.manager.get_computed_blocks(each)
        rig.manager.found = 4

    rig.manager.found = 4
    rig.scheduler.schedule(requests[:1], admit=requests[:1])
    rig.scheduler.during = probe
    rig.scheduler.schedule(requests[1:], admit=requests[1:2])
    assert counts(rig) == (2, 30, 8)
    assert rig.counted["settled"] == 2


def test_a_report_in_the_middle_of_a_step_has_nothing_of_it_and_the_next_has_all() -> None:
    """Catches a lookup that was handed out before it was known whether an admission comes of it."""
    rig, requests = make(ALONE), [Request(num_tokens=tokens) for tokens in (10, 20, 40)]
    handed_out = []

    def report(request: Request) -> None:
        if request is requests[1] and not handed_out:
            stats = rig.manager.make_prefix_cache_stats()
            handed_out.append(stats.counts)
            stats.requests = 7  # whoever has them may do what they like

    rig.manager.found = 4
    rig.scheduler.during = report
    rig.scheduler.schedule(requests, admit=requests[:2])
    assert handed_out == [NOTHING]
    assert counts(rig) == (2, 30, 8)
    assert rig.counted == {"held": 3, "settled": 2, "dropped": 1}


def test_a_step_that_raises_counts_nothing_and_the_next_is_right() -> None:
    rig, requests = make(ALONE), [Request(), Request(num_tokens=200)]

    def fail(request: Request) -> None:
        if request is requests[1]:
            raise LookupError("in the step")

    rig.scheduler.during = fail
    with pytest.raises(LookupError, match="in the step"):
        rig.scheduler.schedule(requests, admit=requests)
    assert counts(rig) == NOTHING
    assert rig.counted == {"held": 2, "settled": 0, "dropped": 2}
    rig.scheduler.during = lambda _: None
    rig.scheduler.schedule(requests[1:], admit=requests[1:])
    assert counts(rig) == (1, 200, 0)


def stepping(original: Any, by_steps: bool) -> tuple[Any, Any]:
    """A scheduler, and the wrapper over a `schedule()` of some signature."""
    context = Context(
        mode="1", features=frozenset(), facts={}, counters=Counters(FIX.counters), log=logging.getLogger("vllm")
    )
    with stand_ins():
        schedule = settle_step(original, context)
    manager_class = type("Manager", (SimpleNamespace,), {"allocate_slots": lambda manager, request: None})
    manager = manager_class(enable_caching=True, log_stats=True, prefix_cache_stats=Stats())
    adopt(manager, context, by_steps=by_steps)
    return SimpleNamespace(kv_cache_manager=manager, running=[], connector=None), schedule


def takes_the_scheduler_only(scheduler: Any) -> Any:
    return (), {}


def takes_what_that_of_0_26_does(scheduler: Any, throttle_prefills: bool = False) -> Any:
    return (throttle_prefills,), {}


def takes_the_arguments(*args: Any) -> Any:
    return args[1:], {}


class Uninspectable:
    """In the place of a function that is not written in Python, and does not say what it takes."""

    __name__ = __qualname__ = "schedule"

    @property
    def __signature__(self) -> Any:
        raise ValueError("no signature found")

    def __call__(self, scheduler: Any, *args: Any) -> Any:
        return args, {}


def takes_anything(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def takes_something_else(scheduler: Any, budget: int = 7, *, throttle_prefills: Any = False) -> Any:
    return (budget, throttle_prefills), {}


@pytest.mark.parametrize(
    ("original", "args", "kwargs", "reaches"),
    [
        (takes_the_scheduler_only, (), {}, ((), {})),
        (takes_the_arguments, (1, 2), {}, ((1, 2), {})),
        (takes_what_that_of_0_26_does, (), {}, ((False,), {})),
        (takes_what_that_of_0_26_does, (True,), {}, ((True,), {})),
        (takes_what_that_of_0_26_does, (None,), {}, ((None,), {})),
        (takes_what_that_of_0_26_does, (), {"throttle_prefills": True}, ((True,), {})),
        (Uninspectable(), (1, 2), {}, ((1, 2), {})),
        (takes_anything, (1, 2), {"more": 3}, ((1, 2), {"more": 3})),
        (takes_anything, (), {}, ((), {})),
        (takes_something_else, (), {}, ((7, False), {})),
        (takes_something_else, (8,), {"throttle_prefills": True}, ((8, True), {})),
    ],
)
def test_what_a_step_is_told_reaches_it(original: Any, args: Any, kwargs: Any, reaches: Any) -> None:
    """Catches a wrapper that takes less than what it is over."""
    for by_steps in (True, False):
        scheduler, schedule = stepping(original, by_steps)
        for _ in range(2):  # the first step of a manager goes another way than those after it
            assert schedule(scheduler, *args, **kwargs) == reaches


@pytest.mark.parametrize("original", [takes_the_scheduler_only, takes_what_that_of_0_26_does])
def test_a_step_that_is_told_too_much_raises_as_released(original: Any) -> None:
    scheduler, schedule = stepping(original, by_steps=True)
    for args, kwargs in (((1, 2), {}), ((), {"budget": 1})):
        with pytest.raises(TypeError):
            schedule(scheduler, *args, **kwargs)
    assert scheduler.kv_cache_manager._kvmend_step is None


# Whose admissions are settled at the end of a step, and whose one by one -------------------------------------------


def inherits(upstream: Any) -> Any:
    return type("Inherits", (upstream,), {})


def adds(upstream: Any) -> Any:
    class Adds(upstream):  # type: ignore[misc]
        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            self.steps = getattr(self, "steps", 0) + 1
            return super().schedule(*args, **kwargs)

    return Adds


def has_a_loop_of_its_own(upstream: Any) -> Any:
    class OwnLoop(upstream):  # type: ignore[misc]
        def schedule(self, waiting: Sequence[Request] = (), admit: Sequence[Request] = ()) -> Any:
            manager = self.kv_cache_manager
            for request in waiting:
                manager.get_computed_blocks(request)
                if request in admit:
                    manager.allocate_slots(request, 16)
            return list(admit)

    return OwnLoop


def has_one_beside(upstream: Any) -> Any:
    class Beside(has_a_loop_of_its_own(upstream)):  # type: ignore[misc]
        def schedule(self, waiting: Sequence[Request] = (), admit: Sequence[Request] = ()) -> Any:
            half = len(waiting) // 2
            return [*super().schedule(waiting[:half], admit), *upstream.schedule(self, waiting[half:], admit)]

    return Beside


@EVERY
@pytest.mark.parametrize(
    ("scheduler_class", "by_steps"),
    [(inherits, True), (adds, True), (has_a_loop_of_its_own, False), (has_one_beside, False)],
)
def test_every_scheduler_counts_its_admissions_once(generation: str, scheduler_class: Any, by_steps: bool) -> None:
    rig = make(generation, scheduler_class=scheduler_class)
    assert allocates_as_released(rig) == by_steps
    waiting = [Request(num_tokens=tokens) for tokens in (10, 20, 40, 80)]
    for admit in ([], waiting[1:2], [], waiting[2:3]):
        rig.scheduler.schedule([each for each in waiting if each.num_computed_tokens == 0], admit)
        for each in admit:
            each.run()
    assert taken(rig)[:3] == (2, 60, 0)


def test_a_manager_that_nobody_s_scheduler_makes_is_settled_one_admission_at_a_time() -> None:
    assert not allocates_as_released(make_rig("record"))
    assert not ends_steps(None)


def test_where_schedule_looks_up_itself_admissions_are_settled_one_by_one() -> None:
    """The request is not named there; it is known by what is in its admission only."""
    assert not allocates_as_released(make("inline"))


def test_a_hybrid_model_without_mamba_layers_is_settled_by_steps() -> None:
    """vLLM's own `schedule()` leaves its lookups to the manager."""
    rig, request = make("inline", mamba=False), Request()
    assert allocates_as_released(rig)
    rig.scheduler.schedule([request])
    rig.scheduler.schedule([request], admit=[request])
    assert taken(rig) == (1, 100, 0, 0, 0, 0)


def test_a_schedule_that_was_replaced_by_a_copy_does_not_end_steps() -> None:
    """vLLM's class with somebody's function in it, which does not call what was there."""

    def replaced(upstream: Any) -> Any:
        upstream.schedule = vars(has_a_loop_of_its_own(upstream))["schedule"]
        return upstream

    rig, request = make("record", scheduler_class=replaced), Request()
    assert not allocates_as_released(rig)
    rig.scheduler.schedule([request])
    rig.scheduler.schedule([request], [request])
    assert counts(rig) == (1, 100, 0)


# What is not as vLLM made it ----------------------------------------------------------------------------------------


def admits_beside(upstream: Any) -> Any:
    """Half of the admissions are in the code of another object, where nobody looks."""

    class Policed(upstream):  # type: ignore[misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.policy = has_a_loop_of_its_own(upstream)

        def schedule(self, waiting: Sequence[Request] = (), admit: Sequence[Request] = ()) -> Any:
            self.policy.schedule(self, waiting[:1], admit)
            for each in waiting[:1]:
                each.run()
            return super().schedule(waiting[1:], admit)

    return Policed


@EVERY
def test_what_a_hidden_loop_admitted_counts_though_a_step_of_vllms_comes_before_the_statistics(generation: str) -> None:
    """Catches a step that throws away what it finds pending: it may have been admitted by somebody else."""
    rig = make(generation, scheduler_class=admits_beside)
    assert allocates_as_released(rig)
    rig.manager.found = 60
    first, second = Request(), Request(num_tokens=200)
    rig.scheduler.schedule([first, second], admit=[first, second])
    assert taken(rig)[:3] == (2, 300, 120)


@EVERY
def test_what_is_settled_later_has_the_values_of_its_lookup(generation: str) -> None:
    """Catches the request's length at the time of the report, when it has its first output token."""
    rig, request = make(generation), Request()
    rig.manager.get_computed_blocks(request)
    rig.manager.allocate_slots(request, 16)
    request.num_computed_tokens, request.status = 100, RequestStatus.RUNNING
    request.num_tokens += 1
    assert taken(rig)[:3] == (1, 100, 0)


class Forwarding:
    """A manager of somebody's own that has vLLM's and forwards to it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Closed:
    """The same, with what `schedule()` calls and nothing more."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def get_computed_blocks(self, request: Request) -> Any:
        return self._inner.get_computed_blocks(request)

    def allocate_slots(self, request: Request, *args: Any) -> Any:
        return self._inner.allocate_slots(request, *args)

    def make_prefix_cache_stats(self) -> Any:
        return self._inner.make_prefix_cache_stats()


@pytest.mark.parametrize("generation", ["in place", "record", "record somehow", "inline"])
@pytest.mark.parametrize("kind", [Forwarding, Closed])
def test_a_manager_that_only_forwards_to_vllms_works_and_counts(generation: str, kind: Any) -> None:
    """Steps may follow each other before the statistics are taken, as with asynchronous scheduling."""
    rig, request, late = make(generation), Request(), Request(num_tokens=200)
    rig.scheduler.kv_cache_manager = kind(rig.manager)
    rig.scheduler.schedule([request])
    assert rig.scheduler.schedule([request], admit=[request]) == [request]
    assert rig.scheduler.schedule([late]) == []
    if generation != "inline":
        assert taken(rig) == (1, 100, 0, 0, 0, 0)
        rig.scheduler.schedule([late], admit=[late])
        assert taken(rig) == (1, 200, 0, 0, 0, 0)


def test_a_function_beneath_that_changes_what_was_found_is_not_taken_for_vllms() -> None:
    """It finds the statistics on, and what counts is what vLLM counted. It does not say that it wraps anything."""
    on = []

    def halved(original: Any) -> Any:
        def lookup(manager: Any, request: Request) -> Any:
            on.append(manager.log_stats)
            blocks, found = original(manager, request)
            return blocks, found // 2

        return lookup

    rig, request = make("record", beneath={"get_computed_blocks": halved}), Request()
    rig.manager.found = 60
    rig.scheduler.schedule([request], admit=[request])
    assert on == [True]
    assert counts(rig) == (1, 100, 60)


@EVERY
def test_an_own_loop_may_allocate_for_a_request_of_its_own_kind(generation: str) -> None:
    """One that can be in no dictionary, as vLLM's own allocation does not mind."""
    rig = make(generation, scheduler_class=has_a_loop_of_its_own)
    stranger = SimpleNamespace(request_id="warm-up", num_computed_tokens=0)
    assert rig.manager.allocate_slots(stranger, 16) is not None


@pytest.mark.parametrize("generation", ["record", ALONE, "record somehow"])
@pytest.mark.parametrize("whole_class", [False, True])
def test_whoever_watches_the_records_sees_each(
    generation: str, whole_class: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a class of statistics of their own, or by putting something over the method of vLLM's."""
    rig, seen, record = make(generation), [], Stats.record

    def watched(stats: Stats, num_tokens: int, num_hits: int, preempted: bool) -> None:
        seen.append((num_tokens, num_hits, preempted))
        record(stats, num_tokens, num_hits, preempted)

    if whole_class:
        monkeypatch.setattr(Stats, "record", watched)
    else:
        rig.manager.prefix_cache_stats = type("Watched", (Stats,), {"record": watched})()
    waiting = [Request(num_tokens=tokens) for tokens in (10, 20)]
    rig.scheduler.schedule(waiting, admit=waiting)
    assert seen == [(10, 0, False), (20, 0, False)]
    assert counts(rig) == (2, 30, 0)


@EVERY
def test_an_own_loop_that_is_older_than_the_fix_is_recognised_at_its_next_step(generation: str) -> None:
    """Catches a request that is admitted and preempted again before the statistics are taken."""
    rig, request = make(generation, scheduler_class=has_a_loop_of_its_own), Request()
    forget(rig.manager)
    rig.scheduler.schedule([request], [request])
    request.preempt()
    assert sum(taken(rig)[0::3]) == 1


@EVERY
def test_random_steps_count_what_a_ledger_counts(generation: str) -> None:
    for seed in range(60):
        chance, rig = random.Random(seed), make(generation)
        waiting: list[Request] = []
        running: list[Request] = []
        right, found, looked_up = [0] * 6, [0] * 6, 0
        for _ in range(60):
            if running and chance.random() < 0.3:
                resumed = running.pop(chance.randrange(len(running)))
                resumed.preempt()
                waiting.insert(0, resumed)
            waiting += [Request(num_tokens=chance.randrange(1, 500)) for _ in range(chance.randrange(3))]
            chosen = [request for request in waiting if chance.random() < 0.3]
            rig.manager.found, rig.manager.full = chance.randrange(10), chance.random() < 0.2
            if waiting and chance.random() < 0.3:
                rig.manager.get_computed_blocks(chance.choice(waiting))
                looked_up += 1
            looked_up += len(waiting)
            probes: list[Request] = []

            def probe(
                _: Request, chance: Any = chance, rig: Any = rig, waiting: Any = waiting, probes: Any = probes
            ) -> None:
                request = chance.choice(waiting)
                if chance.random() < 0.1 and request.status is not RequestStatus.RUNNING:
                    rig.manager.get_computed_blocks(request)
                    probes.append(request)

            rig.scheduler.during = probe
            rig.scheduler.schedule(waiting, chosen)
            looked_up += len(probes)
            if not rig.manager.full:
                for request in chosen:
                    place = 3 if request.preempted and generation != "in place" else 0
                    for offset, value in enumerate((1, request.num_tokens, rig.manager.found)):
                        right[place + offset] += value
                waiting = [request for request in waiting if request not in chosen]
                running += chosen
            if chance.random() < 0.5:
                found = [old + new for old, new in zip(found, taken(rig), strict=True)]
        found = [old + new for old, new in zip(found, taken(rig), strict=True)]
        assert found == right, seed
        assert rig.counted == {
            "held": looked_up,
            "settled": right[0] + right[3],
            "dropped": looked_up - right[0] - right[3],
        }
