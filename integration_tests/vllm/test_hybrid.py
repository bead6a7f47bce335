"""vllm-prefix-stats for hybrid models (full attention and Mamba) with a KV connector.

0.24 - 0.26 look these up in `schedule()` itself, past the manager's lookup, and record there. The same rules hold;
on the other releases the same tests show that the ordinary way is right for hybrid models too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import vllm_release
from runs import Run, probe_when_asked, prompt

from kvmend_fixes.proofs import _vllm_rig as rig

schedulers = pytest.mark.parametrize("scheduler_class", vllm_release.SCHEDULERS.values(), ids=vllm_release.SCHEDULERS)


@pytest.fixture
def hybrid(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """Makes runs with a hybrid cache and a connector, and sees to it that they took the way they are here for."""
    vllm_release.need("connectors for hybrid models")
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator

    asked = 0
    if vllm_release.INLINE_LOOKUP:
        find = HybridKVCacheCoordinator.find_longest_cache_hit_per_group

        def find_longest_cache_hit_per_group(*args: Any, **kwargs: Any) -> Any:
            nonlocal asked
            asked += 1
            return find(*args, **kwargs)

        monkeypatch.setattr(
            HybridKVCacheCoordinator, "find_longest_cache_hit_per_group", find_longest_cache_hit_per_group
        )

    def make(**options: Any) -> Run:
        made = run(hybrid=True, connector=True, **options)
        assert type(made.manager.coordinator) is HybridKVCacheCoordinator
        assert len(made.manager.empty_kv_cache_blocks.blocks) == 2
        return made

    yield make
    assert (asked > 0) == vllm_release.INLINE_LOOKUP


@schedulers
def test_admissions_count_tokens_and_hits_once(hybrid: Callable[..., Run], scheduler_class: Any) -> None:
    """Catches inline records that are put back although the request was admitted."""
    cache = hybrid(scheduler_class=scheduler_class)
    cache.add("first", prompt(100))
    cache.finish()
    cache.add("second", prompt(100))
    cache.finish()
    cache.must_have_counted(2, 200, 96)


@pytest.mark.shows_fault
@schedulers
def test_ten_thousand_deferrals_and_an_abort_count_nothing(hybrid: Callable[..., Run], scheduler_class: Any) -> None:
    """Catches inline records of lookups that the connector deferred."""
    cache = hybrid(scheduler_class=scheduler_class)
    cache.add("deferred", prompt(100), None)
    cache.step(10_000)
    cache.abort("deferred")
    cache.step(3)
    assert cache.scheduler.connector.asked["deferred"] == 10_000
    cache.must_have_counted_in_all(0, 0, 0)


@pytest.mark.shows_fault
def test_several_deferred_requests_and_one_admission_in_a_step_count_the_admission(
    hybrid: Callable[..., Run],
) -> None:
    """Catches putting back too much or too little where several inline lookups follow each other in one step."""
    cache = hybrid()
    for number in range(3):
        cache.add(f"deferred {number}", prompt(50, seed=number), None)
    cache.add("admitted", prompt(100, seed=3), max_tokens=1)
    for number in range(4, 7):
        cache.add(f"deferred {number}", prompt(50, seed=number), None)
    cache.finish("admitted")
    cache.step(3)
    cache.must_have_counted(1, 100, 0)


@pytest.mark.shows_fault
@schedulers
def test_refused_allocations_count_nothing_until_the_admission(
    hybrid: Callable[..., Run], scheduler_class: Any
) -> None:
    """Catches inline records of requests for which there are no blocks."""
    cache = hybrid(scheduler_class=scheduler_class, num_blocks=1 + 16)
    cache.add("holds the blocks", prompt(100), max_tokens=10)
    cache.step()
    cache.add("waits", prompt(100, seed=1), max_tokens=2)
    cache.step(5)
    assert cache.admitted == ["holds the blocks"]
    cache.must_have_counted(1, 100, 0)
    cache.finish()
    cache.must_have_counted(2, 200, 0)


@pytest.mark.shows_fault
def test_a_prompt_that_must_wait_for_a_whole_step_counts_once(hybrid: Callable[..., Run]) -> None:
    """Catches inline records of requests that leave the loop for want of token budget."""
    cache = hybrid(chunked_prefill=False, max_num_batched_tokens=128)
    cache.add("first", prompt(100), max_tokens=4)
    cache.add("does not fit beside it", prompt(100, seed=1), max_tokens=4)
    cache.step()
    cache.must_have_counted(1, 100, 0)
    cache.finish()
    cache.must_have_counted(2, 200, 0)


#: The inline way counts requests that may not read the cache; everything else does not.
_counted_inline = pytest.mark.shows_fault if vllm_release.INLINE_LOOKUP else ()


@pytest.mark.parametrize("deferrals", [pytest.param(0, marks=_counted_inline), pytest.param(2, marks=_counted_inline)])
def test_a_request_that_may_not_read_the_cache_counts_nothing(hybrid: Callable[..., Run], deferrals: int) -> None:
    """Catches the inline record, which heeds no such wish."""
    cache = hybrid()
    cache.add("first", prompt(100), max_tokens=1)
    cache.finish()
    cache.add("asks", prompt(100), *[None] * deferrals, (0, False), max_tokens=1, prompt_logprobs=1)
    cache.finish()
    cache.must_have_counted_in_all(1, 100, 0)


@schedulers
@pytest.mark.parametrize("deferrals", [0, pytest.param(3, marks=pytest.mark.shows_fault)], ids=["at once", "deferred"])
def test_an_asynchronous_load_counts_at_its_first_admission_only(
    hybrid: Callable[..., Run], scheduler_class: Any, deferrals: int
) -> None:
    """Catches a second count when the loaded request is given its slots, and one per deferral."""
    cache = hybrid(scheduler_class=scheduler_class)
    cache.add("loads", prompt(100), *[None] * deferrals, (64, True))
    cache.step(deferrals + 4)
    cache.step(loaded=["loads"])
    cache.finish()
    cache.must_have_counted(1, 100, 0)


@pytest.mark.shows_fault
def test_a_preempted_request_counts_again_as_preempted(hybrid: Callable[..., Run]) -> None:
    """Catches inline records of a preempted request's retries."""
    cache = hybrid(num_blocks=1 + 12)
    cache.add("first", prompt(47), max_tokens=30)
    cache.add("second", prompt(47, seed=1), max_tokens=30)
    cache.step_until_preempted("second")
    tokens = cache.requests["second"].num_tokens
    cache.step(5)
    cache.must_have_counted_in_all(2, 94, 0)
    cache.finish()
    cache.must_have_counted(2, 94, 0)
    cache.must_have_counted_preempted(1, tokens, cache.local["preempted_hits"])


@pytest.mark.shows_fault
def test_the_statistics_object_is_exact_at_the_end_of_every_step(hybrid: Callable[..., Run]) -> None:
    """Catches an inline record that is put back only in the next step, after its statistics were reported."""
    cache = hybrid()
    cache.add("deferred", prompt(100), *[None] * 3, (0, False), max_tokens=1)
    held = cache.manager.prefix_cache_stats
    for _ in range(3):
        step = cache.step()
        cache.must_have_counted_in_all(0, 0, 0)
        assert (step.local or {})["requests"] == 0
        assert cache.manager.prefix_cache_stats is not held
    cache.step()
    cache.must_have_counted(1, 100, 0)


@pytest.mark.shows_fault
def test_probes_through_the_manager_between_inline_lookups_count_nothing(hybrid: Callable[..., Run]) -> None:
    """Catches mixing the two ways of looking up: a probe through the manager while an inline lookup is pending."""
    cache = hybrid()
    deferred = cache.add("deferred", prompt(100), *[None] * 3, (0, False), max_tokens=1)
    stranger = rig.make_request(cache.scheduler, "stranger", prompt(60, seed=1))
    while "deferred" in cache.scheduler.requests:
        cache.step()
        cache.manager.get_computed_blocks(stranger)
        cache.manager.get_computed_blocks(deferred)
    cache.step()
    cache.must_have_counted(1, 100, 0)


@pytest.mark.shows_fault
@pytest.mark.parametrize("hits", [0, 96], ids=["nothing cached", "most cached"])
def test_a_probe_between_an_inline_lookup_and_the_admission_changes_nothing(
    hybrid: Callable[..., Run], hits: int
) -> None:
    """Catches a probe through the manager, by a connector say, that costs an inline lookup its record."""
    cache = hybrid()
    cache.add("warms the cache", prompt(100, seed=0 if hits else 2), max_tokens=1)
    cache.finish()
    probe_when_asked(cache, rig.make_request(cache.scheduler, "stranger", prompt(60, seed=1)))
    cache.add("admitted", prompt(100), None, (0, False), max_tokens=1)
    cache.finish()
    cache.must_have_counted(2, 200, hits)


@pytest.mark.shows_fault
def test_an_allocation_that_no_lookup_led_to_settles_nobody_elses(hybrid: Callable[..., Run]) -> None:
    """Catches an inline lookup that is settled by whoever is given blocks next."""
    cache = hybrid()
    cache.add("deferred", prompt(100), None)
    cache.scheduler.schedule()
    stranger = rig.make_request(cache.scheduler, "stranger", prompt(60, seed=1))
    assert cache.manager.allocate_slots(stranger, 60) is not None
    cache.must_have_counted_in_all(0, 0, 0)


def test_with_statistics_off_requests_run(hybrid: Callable[..., Run]) -> None:
    """Catches an inline hold that needs a statistics object."""
    cache = hybrid(log_stats=False)
    cache.add("deferred", prompt(100), None, (0, False), max_tokens=1)
    cache.finish()
    assert cache.admitted == ["deferred"]
    assert cache.manager.prefix_cache_stats is None


@pytest.mark.shows_fault
def test_a_hybrid_model_without_a_connector_counts_once_per_admission(run: Callable[..., Run]) -> None:
    """Catches a hybrid cache whose ordinary lookup is not held."""
    vllm_release.need("connectors for hybrid models")
    cache = run(hybrid=True, num_blocks=1 + 16)
    cache.add("holds the blocks", prompt(100), max_tokens=10)
    cache.add("waits", prompt(100, seed=1), max_tokens=2)
    cache.finish()
    cache.must_have_counted(2, 200, 0)
