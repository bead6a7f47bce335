"""vllm-prefix-stats: any scheduler that uses the KV cache manager is counted right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import vllm_release
from runs import Run, prompt
from schedulers import Noting, OwnLoop
from vllm.v1.core.kv_cache_manager import KVCacheManager

from kvmend.loading import apply_all, remove_all

MakeRun = Callable[..., Run]


@pytest.mark.shows_fault
def test_a_subclass_of_the_scheduler_counts_once_per_admission(run: MakeRun) -> None:
    """Catches a fix bound to the default scheduler class."""
    cache = run(scheduler_class=Noting, connector=True)
    cache.add("deferred", prompt(100), None, None, (0, False))
    cache.finish()
    assert len(cache.scheduler.noted) >= 3
    cache.must_have_counted(1, 100, 0)


@pytest.mark.shows_fault
def test_a_scheduling_loop_of_one_s_own_counts_once_per_admission(run: MakeRun) -> None:
    """Catches a fix that sits in `schedule()`, which `--scheduler-cls` and vllm-ascend replace."""
    cache = run(scheduler_class=OwnLoop, num_blocks=1 + 8)
    cache.add("holds the blocks", prompt(100), max_tokens=6)
    cache.add("waits", prompt(100, shared=0, seed=1), max_tokens=2)
    cache.finish()
    assert len(cache.scheduler.lookups) > 3
    cache.must_have_counted(2, 200, 0)


def test_a_scheduling_loop_of_one_s_own_reuses_blocks_as_before(run: MakeRun) -> None:
    """Catches a fix under which such a loop finds or computes other tokens than without."""
    cache = run(scheduler_class=OwnLoop)
    cache.add("first", prompt(100, shared=64), max_tokens=2)
    cache.finish()
    cache.add("second", prompt(100, shared=64, seed=1), max_tokens=2)
    assert cache.step().scheduled == {"second": 36}
    cache.finish()
    cache.must_have_counted(2, 200, 64)


@pytest.mark.shows_fault
def test_a_scheduler_that_runs_ahead_of_its_outputs_counts_once_per_admission(run: MakeRun) -> None:
    """Catches counts tied to the output of a step: the asynchronous scheduler plans the next one before it is there."""
    vllm_release.need("asynchronous scheduler")
    cache = run(scheduler_class=vllm_release.SCHEDULERS["AsyncScheduler"], connector=True, num_blocks=1 + 20)
    for number in range(4):
        cache.add(f"request {number}", prompt(100, seed=number), *[None] * number, (0, False), max_tokens=8)
    cache.run_ahead(depth=2)
    cache.must_have_counted_in_all(4, 400, 0)


def _widened(base: type, values: int) -> type:
    class Widened(base):  # type: ignore[misc, valid-type]
        """Says less or more about a lookup than vLLM does."""

        def get_computed_blocks(self, request: Any) -> tuple[Any, ...]:
            return (*super().get_computed_blocks(request), "more", "and more")[:values]

    return Widened


@pytest.mark.shows_fault
@pytest.mark.parametrize("values", [2, 3, 4])
def test_a_manager_subclass_returns_as_many_values_as_it_likes(run: MakeRun, values: int) -> None:
    """Catches a fix that unpacks what a lookup returns: 2, 3 and 4 values have been seen in the field."""
    cache = run(scheduler_class=OwnLoop, num_blocks=1 + 8)
    cache.manager.__class__ = _widened(type(cache.manager), values)
    cache.add("holds the blocks", prompt(100), max_tokens=4)
    cache.add("waits", prompt(100, seed=1), max_tokens=2)
    cache.finish()
    assert {len(found) for found in cache.scheduler.lookups} == {values}
    cache.must_have_counted(2, 200, 0)


@pytest.fixture
def foreign_lookup(outcome: str) -> Iterator[Callable[[int], None]]:
    """Puts another plugin's wrapper of the lookup in place before kvmend comes."""
    remove_all()
    released = vars(KVCacheManager)["get_computed_blocks"]

    def install(values: int) -> None:
        def get_computed_blocks(self: Any, request: Any) -> tuple[Any, ...]:
            return (*released(self, request), "more", "and more")[:values]

        KVCacheManager.get_computed_blocks = get_computed_blocks
        apply_all("vllm")

    yield install
    remove_all()
    KVCacheManager.get_computed_blocks = released
    apply_all("vllm")


@pytest.mark.shows_fault
@pytest.mark.parametrize("values", [2, 3, 4])
def test_another_plugin_s_lookup_may_return_any_number_of_values(
    run: MakeRun, foreign_lookup: Callable[[int], None], values: int
) -> None:
    """Catches a fix that knows only the arity of the release it was written for."""
    foreign_lookup(values)
    cache = run(scheduler_class=OwnLoop, num_blocks=1 + 8)
    cache.add("holds the blocks", prompt(100), max_tokens=4)
    cache.add("waits", prompt(100, seed=1), max_tokens=2)
    cache.finish()
    assert {len(found) for found in cache.scheduler.lookups} == {values}
    cache.must_have_counted(2, 200, 0)


def test_two_schedulers_in_one_process_count_for_themselves(run: MakeRun) -> None:
    """Catches state shared between managers, as with data-parallel engines in one process."""
    one, other = run(connector=True), run(connector=True)
    one.add("deferred", prompt(100), None, (0, False))
    one.scheduler.schedule()
    other.add("admitted", prompt(50), max_tokens=1)
    other.finish()
    one.scheduler.schedule()
    assert one.manager.make_prefix_cache_stats().hits == 0
    other.must_have_counted(1, 50, 0)
