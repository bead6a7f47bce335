"""vllm-prefix-stats: the statistics object that others hold behaves as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import vllm_release
from runs import Miscounted, Run, prompt

from kvmend_fixes.proofs import _vllm_rig as rig

MakeRun = Callable[..., Run]


def test_the_statistics_object_stays_the_same_within_a_step(run: MakeRun) -> None:
    """Catches a count that goes into another object than the one in place: whoever holds that one reads nothing."""
    cache = run(connector=True)
    held = cache.manager.prefix_cache_stats
    cache.add("deferred", prompt(100), None, (0, False))
    cache.scheduler.schedule()
    assert cache.manager.prefix_cache_stats is held
    cache.scheduler.schedule()
    assert cache.manager.prefix_cache_stats is held
    assert cache.manager.make_prefix_cache_stats() is held
    assert cache.manager.prefix_cache_stats is not held


@pytest.mark.shows_fault
def test_whoever_holds_the_statistics_object_sees_the_admission_and_nothing_before(run: MakeRun) -> None:
    """Catches counts that are put right only when the statistics are taken."""
    cache = run(connector=True)
    held = cache.manager.prefix_cache_stats
    cache.add("deferred", prompt(100), None, (0, False))
    cache.scheduler.schedule()
    _must_be(held, requests=0, queries=0)
    cache.scheduler.schedule()
    _must_be(held, requests=1, queries=100)


def _must_be(stats: Any, **right: int) -> None:
    found = {name: getattr(stats, name) for name in right}
    if found != right:
        raise Miscounted(f"the object held says {found}, right is {right}")


def test_during_a_lookup_and_after_it_the_object_is_one_of_vllm_s(run: MakeRun) -> None:
    """Catches a stand-in that stays in place of the statistics, e.g. after a lookup that fails."""
    from vllm.v1.metrics.stats import PrefixCacheStats

    cache = run()
    held = cache.manager.prefix_cache_stats
    assert type(held) is PrefixCacheStats
    with pytest.raises(AttributeError):
        cache.manager.get_computed_blocks(object())
    assert cache.manager.prefix_cache_stats is held
    cache.add("runs on", prompt(100), max_tokens=1)
    cache.finish()
    cache.must_have_counted(1, 100, 0)


@pytest.mark.shows_fault
def test_taking_the_statistics_twice_in_a_step_gives_the_counts_once(run: MakeRun) -> None:
    """Catches a count that is reported by both calls, or by the second one."""
    cache = run(connector=True)
    cache.add("deferred", prompt(100), None, None, (0, False))
    for right in (0, 0, 1, 0):
        cache.scheduler.schedule()
        first, second = cache.manager.make_prefix_cache_stats(), cache.manager.make_prefix_cache_stats()
        _must_be(first, requests=right, queries=100 * right)
        assert rig.counts(second) == dict.fromkeys(rig.counts(second) or {}, 0)
        assert first is not second


@pytest.mark.shows_fault
def test_a_lookup_made_in_an_earlier_step_counts_in_the_step_of_the_admission(run: MakeRun) -> None:
    """Catches a lookup that is reported with the step that made it, or lost when that step's statistics leave."""
    cache = run(num_blocks=1 + 8)
    cache.add("holds the blocks", prompt(100), max_tokens=4)
    waits = cache.add("waits", prompt(100, seed=1), max_tokens=1)
    reported = []
    while not waits.is_finished():
        step = cache.step()
        reported.append(("waits" in step.scheduled, (step.local or {})["requests"]))
    # The other request is admitted in the first step.
    if reported != [(scheduled, int(step == 0 or scheduled)) for step, (scheduled, _) in enumerate(reported)]:
        raise Miscounted(f"(waits is scheduled, requests counted) by step: {reported}")


@pytest.mark.parametrize("pending", [False, True], ids=["idle", "with a lookup pending"])
def test_the_reset_flag_comes_with_the_next_statistics_and_with_no_others(run: MakeRun, pending: bool) -> None:
    """Catches a reset that is written to a stand-in and lost, so that dashboards keep the old window."""
    cache = run(connector=True)
    cache.add("warms the cache", prompt(100), max_tokens=1)
    cache.finish()
    if pending:
        cache.add("deferred", prompt(100, seed=1), None, None, (0, False))
        cache.step()
    assert cache.scheduler.reset_prefix_cache()
    assert [cache.manager.make_prefix_cache_stats().reset for _ in range(3)] == [True, False, False]


@pytest.mark.shows_fault
def test_counts_and_the_reset_flag_of_one_step_come_together(run: MakeRun) -> None:
    """Catches a reset that wipes out, or is wiped out by, a lookup that is settled after it."""
    cache = run(connector=True)
    cache.add("deferred", prompt(100), None, (0, False))
    cache.scheduler.schedule()
    assert cache.scheduler.reset_prefix_cache()
    cache.scheduler.schedule()
    stats = cache.manager.make_prefix_cache_stats()
    assert stats.reset
    _must_be(stats, requests=1, queries=100)


@pytest.mark.any_unit
def test_the_statistics_reach_the_engine_s_output(run: MakeRun) -> None:
    """Catches counts that are right in the manager and absent from what `/metrics` is made of."""
    cache = run()
    cache.add("first", prompt(100), max_tokens=1)
    names = set(cache.step().local or {})
    assert names == set(rig.COUNTERS if vllm_release.COUNTS_PREEMPTED else rig.COUNTERS[:3])
