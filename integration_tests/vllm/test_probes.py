"""vllm-prefix-stats: a lookup that leads to no admission counts nothing, whoever makes it and when."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
from runs import Run, probe_when_asked, prompt

from kvmend_fixes.proofs import _vllm_rig as rig

MakeRun = Callable[..., Run]


@pytest.mark.shows_fault
def test_a_probe_for_a_request_that_is_never_scheduled_counts_nothing(run: MakeRun) -> None:
    """Catches lookups of a router or a cache-aware balancer in the statistics."""
    cache = run()
    cache.add("warms the cache", prompt(100), max_tokens=1)
    cache.finish()
    stranger = rig.make_request(cache.scheduler, "stranger", prompt(100))
    for _ in range(50):
        assert cache.manager.get_computed_blocks(stranger)[1] == 96
    cache.add("comes later", prompt(40, seed=1), max_tokens=1)
    cache.finish()
    cache.must_have_counted(2, 140, 0)


@pytest.mark.shows_fault
def test_a_probe_for_a_waiting_request_adds_nothing_to_its_admission(run: MakeRun) -> None:
    """Catches a probe that is counted beside the scheduler's own lookup."""
    cache = run()
    waiting = cache.add("waiting", prompt(100))
    cache.manager.get_computed_blocks(waiting)
    cache.manager.get_computed_blocks(waiting)
    cache.finish()
    cache.must_have_counted(1, 100, 0)


@pytest.mark.shows_fault
@pytest.mark.parametrize("probed", ["prefilling", "decoding"])
def test_probes_for_a_running_request_count_nothing(run: MakeRun, probed: str) -> None:
    """Catches a probe settled by the next slots a running request is given, which are no admission."""
    cache = run(max_num_batched_tokens=32)
    running = cache.add("running", prompt(100), max_tokens=12)
    cache.step(1 if probed == "prefilling" else 5)
    assert (running.num_computed_tokens < 100) == (probed == "prefilling")
    while "running" in cache.scheduler.requests:
        cache.manager.get_computed_blocks(running)
        cache.step()
    cache.must_have_counted(1, 100, 0)


@pytest.mark.shows_fault
def test_a_probe_for_a_request_whose_load_is_under_way_counts_nothing(run: MakeRun) -> None:
    """Catches a probe settled when a loaded request is given its slots, its second admission."""
    cache = run(connector=True)
    loading = cache.add("loading", prompt(100), (64, True))
    cache.step()
    for _ in range(3):
        cache.manager.get_computed_blocks(loading)
        cache.step()
    cache.step(loaded=["loading"])
    cache.manager.get_computed_blocks(loading)
    cache.finish()
    cache.must_have_counted(1, 100, 0)


@pytest.mark.shows_fault
def test_a_probe_for_another_request_between_lookup_and_admission_changes_nothing(run: MakeRun) -> None:
    """Catches a probe that is counted, and one that makes the admitted request go uncounted."""
    cache = run(connector=True)
    stranger = rig.make_request(cache.scheduler, "stranger", prompt(60, seed=1))
    probe_when_asked(cache, stranger)
    cache.add("admitted", prompt(100), None, (0, False))
    cache.finish()
    cache.must_have_counted(1, 100, 0)


@pytest.mark.shows_fault
def test_a_probe_for_the_same_request_between_lookup_and_admission_changes_nothing(run: MakeRun) -> None:
    """Catches two records for one admission."""
    cache = run(connector=True)
    probe_when_asked(cache, cache.add("admitted", prompt(100), None, (0, False)))
    cache.finish()
    cache.must_have_counted(1, 100, 0)


@pytest.mark.shows_fault
def test_an_allocation_that_no_lookup_led_to_counts_nothing(run: MakeRun) -> None:
    """Catches somebody else's pending lookup taken for that of a request that was never looked up."""
    cache = run(connector=True)
    cache.add("deferred", prompt(100), None)
    cache.scheduler.schedule()
    stranger = rig.make_request(cache.scheduler, "stranger", prompt(60, seed=1))
    assert cache.manager.allocate_slots(stranger, 60) is not None
    cache.must_have_counted_in_all(0, 0, 0)


def test_what_a_probe_returns_and_leaves_behind_is_the_release_s_own_business(run: MakeRun) -> None:
    """Catches a fix that changes what is found, or that takes blocks."""
    cache = run()
    cache.add("warms the cache", prompt(100, shared=50), max_tokens=1)
    cache.finish()
    free = cache.manager.block_pool.get_num_free_blocks()
    stranger = rig.make_request(cache.scheduler, "stranger", prompt(100, shared=50, seed=1))
    blocks, hits, *_ = cache.manager.get_computed_blocks(stranger)
    assert (hits, len(blocks.get_block_ids()[0])) == (48, 3)
    assert cache.manager.block_pool.get_num_free_blocks() == free


def test_requests_that_were_deferred_and_aborted_are_garbage(run: MakeRun) -> None:
    """Catches memory that grows with deferred requests: at most the last one looked up may still be kept."""
    cache = run(connector=True)
    gone = []
    for number in range(200):
        request = cache.add(f"deferred {number}", prompt(32, seed=number), None)
        gone.append(weakref.ref(request))
    del request
    cache.step(3)
    for number in range(200):
        cache.abort(f"deferred {number}")
    cache.requests.clear()
    cache.step()
    gc.collect()
    assert sum(reference() is not None for reference in gone) <= 1
    cache.add("looked up next", prompt(32, seed=1000), max_tokens=1)
    cache.finish()
    gc.collect()
    assert not any(reference() is not None for reference in gone)


def test_many_probes_leave_no_more_behind_than_one(run: MakeRun) -> None:
    """Catches a list of held lookups: after any number of probes the manager refers to no more than after one."""
    cache = run()

    def probe(number: int) -> int:
        stranger = rig.make_request(cache.scheduler, f"stranger {number}", prompt(32, seed=number))
        cache.manager.get_computed_blocks(stranger)
        # Up to 0.10.0 the manager itself remembers the block hashes of everybody it was asked about.
        getattr(cache.manager, "req_to_block_hashes", {}).clear()
        return sum(len(gc.get_referents(each)) for each in vars(cache.manager).values())

    after_one = probe(0)
    assert max(probe(number) for number in range(1, 100)) == after_one
