"""vllm-prefix-stats: one record per admission, with the values of the last lookup, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import vllm_release
from runs import Miscounted, Run, prompt

from kvmend_fixes.proofs import _vllm_rig as rig

MakeRun = Callable[..., Run]
schedulers = pytest.mark.parametrize("scheduler_class", vllm_release.SCHEDULERS.values(), ids=vllm_release.SCHEDULERS)


@schedulers
def test_a_request_that_is_admitted_at_once_counts_its_tokens_and_hits_once(run: MakeRun, scheduler_class: Any) -> None:
    """Catches a fix that loses admissions, or counts a decoding step as one."""
    cache = run(scheduler_class=scheduler_class)
    cache.add("first", prompt(100))
    cache.finish()
    cache.add("second", prompt(100))
    cache.finish()
    cache.must_have_counted(2, 200, 96)


@schedulers
def test_an_admission_counts_though_a_streaming_session_goes_on_after_it(run: MakeRun, scheduler_class: Any) -> None:
    """Catches a lookup that is taken back because its request is not the last one that was admitted."""
    vllm_release.need("streaming sessions")
    cache = run(scheduler_class=scheduler_class)

    def chunk(token_ids: list[int]) -> Any:
        request = rig.make_request(cache.scheduler, "session", token_ids, max_tokens=1)
        request.resumable = True
        return request

    cache.requests["session"] = chunk(prompt(100))
    cache.scheduler.add_request(cache.requests["session"])
    planned = cache.scheduler.schedule()
    cache.add("other", prompt(60, seed=1), max_tokens=4)
    cache.scheduler.add_request(chunk(prompt(40, seed=2)))
    cache.take(rig.finish_step(cache.scheduler, planned))
    step = cache.step()
    assert step.scheduled.keys() == {"other", "session"}
    cache.must_have_counted(2, 160, 0)


@pytest.mark.shows_fault
@schedulers
def test_ten_thousand_deferrals_and_an_abort_count_nothing(run: MakeRun, scheduler_class: Any) -> None:
    """Catches lookups counted although the connector answered None."""
    cache = run(scheduler_class=scheduler_class, connector=True)
    cache.add("deferred", prompt(100), None)
    cache.step(10_000)
    cache.abort("deferred")
    cache.step(3)
    assert cache.scheduler.connector.asked["deferred"] == 10_000
    cache.must_have_counted_in_all(0, 0, 0)
    assert cache.external.total() == 0


@pytest.mark.shows_fault
@schedulers
def test_a_deferred_request_counts_once_when_it_is_admitted(run: MakeRun, scheduler_class: Any) -> None:
    """Catches a count per lookup, and a count that is lost because earlier lookups were dropped."""
    cache = run(scheduler_class=scheduler_class, connector=True)
    cache.add("deferred", prompt(100), *[None] * 7, (0, False))
    cache.finish()
    cache.must_have_counted(1, 100, 0)


@pytest.mark.shows_fault
def test_the_hits_are_those_of_the_last_lookup(run: MakeRun) -> None:
    """Catches a fix that keeps the first lookup: what was not cached then is by the time of admission."""
    cache = run(connector=True)
    cache.add("deferred", prompt(100, shared=64), None, (0, False))
    cache.add("computed meanwhile", prompt(100, shared=64, seed=1), max_tokens=1)
    cache.finish()
    cache.must_have_counted(2, 200, 64)


@pytest.mark.shows_fault
@schedulers
def test_refused_allocations_count_nothing_until_the_admission(run: MakeRun, scheduler_class: Any) -> None:
    """Catches the count at every retry while there are too few free KV blocks."""
    cache = run(scheduler_class=scheduler_class, num_blocks=1 + 8)
    cache.add("holds the blocks", prompt(100), max_tokens=20)
    cache.step()
    cache.add("waits", prompt(100, seed=1), max_tokens=2)
    cache.step(10)
    assert cache.admitted == ["holds the blocks"]
    cache.must_have_counted(1, 100, 0)
    cache.finish()
    assert cache.admitted == ["holds the blocks", "waits"]
    cache.must_have_counted(2, 200, 0)


@pytest.mark.any_unit
@pytest.mark.shows_fault
def test_refusals_make_no_difference_to_the_counts(run: MakeRun) -> None:
    """Catches what the test above does, also where the counters are of blocks, as in 0.8.5."""
    cramped, roomy = run(num_blocks=1 + 8), run()
    for cache in (cramped, roomy):
        for number in range(3):
            cache.add(f"request {number}", prompt(100, seed=number), max_tokens=5)
        cache.finish()
        cache.take_the_rest()
    if cramped.local != roomy.local:
        raise Miscounted(f"with refusals {cramped.local}, without {roomy.local}")
    assert cramped.local["requests"] == 3


@pytest.mark.shows_fault
def test_a_refused_request_that_is_aborted_counts_nothing(run: MakeRun) -> None:
    """Catches a pending lookup that is settled by another request's admission."""
    cache = run(num_blocks=1 + 8)
    cache.add("holds the blocks", prompt(100), max_tokens=20)
    cache.step()
    cache.add("refused", prompt(100, seed=1))
    cache.step(5)
    cache.abort("refused")
    cache.add("comes later", prompt(50, seed=2), max_tokens=1)
    cache.finish("holds the blocks", "comes later")
    cache.must_have_counted(2, 150, 0)


@pytest.mark.shows_fault
def test_a_prompt_that_must_wait_for_a_whole_step_counts_once(run: MakeRun) -> None:
    """Catches the other early exit of the loop: looked up, then found too long for what is left of the budget."""
    vllm_release.need("prompts that are kept whole")
    cache = run(chunked_prefill=False, max_num_batched_tokens=128)
    cache.add("first", prompt(100), max_tokens=4)
    cache.add("does not fit beside it", prompt(100, seed=1), max_tokens=4)
    cache.step()
    assert cache.admitted == ["first"]
    cache.must_have_counted(1, 100, 0)
    cache.finish()
    cache.must_have_counted(2, 200, 0)


def test_a_prompt_computed_in_chunks_counts_once(run: MakeRun) -> None:
    """Catches a fix that takes every allocation for an admission."""
    cache = run(max_num_batched_tokens=32)
    cache.add("long", prompt(200), max_tokens=3)
    cache.finish()
    cache.must_have_counted(1, 200, 0)


@pytest.mark.any_unit
def test_without_a_prefix_cache_nothing_is_counted(run: MakeRun) -> None:
    """Catches a fix that counts admissions instead of lookups."""
    cache = run(enable_caching=False)
    cache.add("first", prompt(100))
    cache.finish()
    cache.add("second", prompt(100))
    cache.finish()
    assert cache.admitted == ["first", "second"]
    cache.must_have_counted_in_all(0, 0, 0)


def test_a_request_that_may_not_read_the_cache_counts_nothing(run: MakeRun) -> None:
    """Catches a record for prompt log-probabilities, whose prompt is computed whole."""
    cache = run()
    cache.add("first", prompt(100), max_tokens=1)
    cache.finish()
    cache.add("wants prompt log-probabilities", prompt(100), max_tokens=1, prompt_logprobs=1)
    cache.finish()
    cache.must_have_counted_in_all(1, 100, 0)


@pytest.mark.shows_fault
def test_a_request_that_may_not_read_the_cache_drops_nobody_elses_count(run: MakeRun) -> None:
    """Catches a lookup without a record that settles, or is settled by, the one pending before it."""
    cache = run(connector=True)
    cache.add("deferred", prompt(100), None, None, (0, False))
    cache.add("wants prompt log-probabilities", prompt(60, seed=1), max_tokens=1, prompt_logprobs=1)
    cache.finish()
    cache.must_have_counted_in_all(1, 100, 0)


def test_with_statistics_off_requests_run_and_nothing_is_reported(run: MakeRun) -> None:
    """Catches a fix that needs a statistics object: without statistics there is None."""
    cache = run(log_stats=False, connector=True)
    cache.add("deferred", prompt(100), None, (32, True))
    cache.step(2)
    step = cache.step(loaded=["deferred"])
    cache.finish()
    assert (step.local, step.external, cache.manager.prefix_cache_stats) == (None, None, None)
    assert cache.manager.make_prefix_cache_stats() is None


@schedulers
def test_an_asynchronous_load_counts_at_its_first_admission_only(run: MakeRun, scheduler_class: Any) -> None:
    """Catches a second count when the loaded request is given its slots to compute the rest."""
    cache = run(scheduler_class=scheduler_class, connector=True)
    cache.add("loads", prompt(100), (64, True))
    cache.step()
    assert cache.requests["loads"].status.name == "WAITING_FOR_REMOTE_KVS"
    cache.must_have_counted(1, 100, 0)
    cache.step(20)
    cache.step(loaded=["loads"])
    cache.finish()
    assert cache.admitted == ["loads"]
    cache.must_have_counted(1, 100, 0)


@pytest.mark.shows_fault
def test_an_asynchronous_load_that_is_first_deferred_and_then_refused_counts_once(run: MakeRun) -> None:
    """Catches deferrals and refusals counted for a request that loads."""
    cache = run(connector=True, num_blocks=1 + 8)
    cache.add("holds the blocks", prompt(100, seed=1), max_tokens=8)
    cache.add("loads", prompt(100), None, None, (64, True))
    cache.step(6)
    cache.must_have_counted(1, 100, 0)
    cache.finish("holds the blocks")
    cache.step(2)
    assert cache.requests["loads"].status.name == "WAITING_FOR_REMOTE_KVS"
    cache.step(loaded=["loads"])
    cache.finish()
    cache.must_have_counted(2, 200, 0)


@pytest.mark.parametrize("loads_async", [True, False], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("deferrals", [0, pytest.param(3, marks=pytest.mark.shows_fault)], ids=["at once", "deferred"])
def test_local_and_external_hits_stay_apart(run: MakeRun, loads_async: bool, deferrals: int) -> None:
    """Catches external tokens in the local counters: 1000 prompt tokens, 600 of them local, 200 external."""
    cache = run(connector=True, block_size=8)
    cache.add("warms the cache", prompt(601, shared=600), max_tokens=1)
    cache.finish()
    cache.local.clear()
    cache.external.clear()
    cache.add("asks", prompt(1000, shared=600, seed=1), *[None] * deferrals, (200, loads_async), max_tokens=1)
    cache.step(deferrals + 1)
    cache.step(loaded=["asks"] if loads_async else [])
    cache.finish()
    assert cache.scheduler.connector.told["asks"] == 600
    cache.must_have_counted(1, 1000, 600)
    if vllm_release.COUNTS_EXTERNAL:
        # How many tokens a connector is said to be asked for, and how often, is another matter of each release.
        assert cache.external["hits"] == 200


def preempting_run(run: MakeRun, scheduler_class: Any) -> Run:
    """Two requests that outgrow the pool: the second is preempted once the first needs a fourth block."""
    cache = run(scheduler_class=scheduler_class, block_size=16, num_blocks=1 + 7)
    cache.add("first", prompt(47), max_tokens=30)
    cache.add("second", prompt(47, seed=1), max_tokens=30)
    cache.step_until_preempted("second")
    return cache


@pytest.mark.shows_fault
@schedulers
def test_a_preempted_request_counts_again_as_preempted_when_it_is_resumed(run: MakeRun, scheduler_class: Any) -> None:
    """Catches retries of a preempted request in `preempted_*`, and a resumption that goes uncounted."""
    cache = preempting_run(run, scheduler_class)
    cache.must_have_counted_in_all(2, 94, 0)
    tokens = cache.requests["second"].num_tokens
    cache.step(5)
    cache.must_have_counted_in_all(2, 94, 0)
    cache.finish()
    hits = 32  # the blocks that its prompt filled, nobody having needed them meanwhile
    cache.must_have_counted_in_all(3, 94 + tokens, hits)
    if vllm_release.COUNTS_PREEMPTED:
        cache.must_have_counted(2, 94, 0)
        cache.must_have_counted_preempted(1, tokens, hits)


@pytest.mark.shows_fault
@schedulers
def test_a_preempted_request_that_is_aborted_before_it_is_resumed_counts_nothing_more(
    run: MakeRun, scheduler_class: Any
) -> None:
    """Catches retries of a preempted request that never comes back."""
    cache = preempting_run(run, scheduler_class)
    cache.step(5)
    cache.abort("second")
    cache.finish("first")
    cache.must_have_counted_in_all(2, 94, 0)
