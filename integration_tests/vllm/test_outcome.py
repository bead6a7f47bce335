"""vllm-prefix-stats on the installed release: what is touched, and that it can be taken off and put on again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import pytest
import vllm_release
from runs import Run, prompt

from kvmend.loading import apply_all, remove_all
from kvmend_fixes.vllm.prefix_stats import FIX


def in_place() -> dict[str, Any]:
    """What is at each place that the fix knows."""
    found = {}
    for site in FIX.sites:
        holder, _, name = site.qualname.rpartition(".")
        module = sys.modules.get(site.module)
        found[site.key] = vars(getattr(module, holder, object)).get(name)
    return found


def is_vllms(function: Any) -> bool:
    """Whether the release's own source defines this function; also a function that is not there is not ours."""
    return function is None or (not hasattr(function, "__wrapped__") and "/vllm/v1/" in function.__code__.co_filename)


@pytest.fixture
def taken_off(outcome: str) -> Iterator[dict[str, Any]]:
    """kvmend is off; gives what was in place while it was on."""
    on = in_place()
    remove_all()
    yield on
    apply_all("vllm")


def refused_and_aborted(cache: Run) -> Run:
    """One request is admitted and another one refused four times; the client gives up."""
    cache.add("holds the blocks", prompt(100), max_tokens=20)
    cache.add("refused", prompt(100, seed=1))
    cache.step(4)
    cache.abort("refused")
    cache.finish()
    return cache


@pytest.mark.any_unit
def test_only_what_the_release_needs_is_touched(outcome: str) -> None:
    """Catches a wrapper on a release that needs none, and a place left out on one that needs it."""
    sites = {site for each in apply_all("vllm") if each.outcome == "applied" for site in each.sites}
    touched = {key for key, function in in_place().items() if not is_vllms(function)}
    assert touched == sites & {site.key for site in FIX.sites}
    if outcome == "applied":
        manager, scheduler = "vllm.v1.core.kv_cache_manager:KVCacheManager", "vllm.v1.core.sched.scheduler:Scheduler"
        assert touched >= {f"{manager}.get_computed_blocks", f"{scheduler}.schedule"}
        inline = "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.find_longest_cache_hit_per_group"
        assert (inline in touched) == vllm_release.INLINE_LOOKUP


@pytest.mark.any_unit
def test_taking_it_off_puts_vllm_s_own_functions_back(taken_off: dict[str, Any]) -> None:
    """Catches a wrapper that stays behind."""
    assert all(is_vllms(function) for function in in_place().values())


def test_taken_off_the_fault_is_back_and_put_on_again_it_is_gone(
    run: Callable[..., Run], taken_off: dict[str, Any], outcome: str
) -> None:
    """Catches a fix that only works once, and a removal that does not reach managers already made."""
    as_released = 1 if vllm_release.NATIVELY_FIXED else 5
    in_force = as_released if outcome == "disabled" else 1
    refused_and_aborted(run(num_blocks=1 + 8)).must_have_counted(as_released, 100 * as_released, 0)
    older = run(num_blocks=1 + 8)
    apply_all("vllm")
    for cache in (run(num_blocks=1 + 8), older):
        refused_and_aborted(cache).must_have_counted(in_force, 100 * in_force, 0)


@pytest.mark.any_unit
def test_applying_again_changes_nothing(run: Callable[..., Run], outcome: str) -> None:
    """Catches a second layer of wrappers, under which a lookup is held twice and settled never."""
    before = in_place()
    results = apply_all("vllm")
    assert [str(each.outcome) for each in results if each.fix == FIX.id] == [outcome]
    assert in_place() == before


def test_taking_it_off_while_a_lookup_is_pending_leaves_a_working_scheduler(
    run: Callable[..., Run], outcome: str
) -> None:
    """Catches a removal that leaves half a lookup: the admission goes uncounted, everything later is counted."""
    cache = run(num_blocks=1 + 8)
    cache.add("holds the blocks", prompt(100), max_tokens=3)
    cache.add("refused", prompt(100, seed=1), max_tokens=1)
    cache.step()
    remove_all()
    try:
        cache.finish()
        cache.add("later", prompt(50, seed=1), max_tokens=1)
        cache.finish()
    finally:
        apply_all("vllm")
    assert cache.admitted == ["holds the blocks", "refused", "later"]
    assert cache.local["queries"] >= 250


def test_what_this_release_lacks_is_what_pins_toml_says() -> None:
    """Catches tests that skip themselves because a feature is no longer recognised."""
    pins = tomllib.loads((Path(__file__).resolve().parents[1] / "pins.toml").read_text())
    known = [pin for pin in pins["vllm"] if pin["release"] == vllm_release.VERSION.partition("+")[0]]
    if not known:
        pytest.skip(f"pins.toml says nothing of vLLM {vllm_release.VERSION}")
    assert set(known[0].get("lacks", [])) == vllm_release.LACKS
