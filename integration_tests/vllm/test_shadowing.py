"""Managers of others that bypass a fix are found when the scheduler is made, and reported; the fix stays as it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import vllm_release
from runs import Run, prompt
from schedulers import OwnLoop
from vllm.v1.core import kv_cache_manager as managers
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import scheduler as upstream

from kvmend import applier, report
from kvmend.journal import JOURNAL
from kvmend.loading import apply_all, remove_all
from kvmend.outcome import Outcome
from kvmend_fixes.vllm.copied_scheduler import FIX as COPIED
from kvmend_fixes.vllm.prefix_stats import FIX

MakeRun = Callable[..., Run]


class Bypassing(KVCacheManager):
    """A lookup of its own, which does not call vLLM's."""

    def get_computed_blocks(self, request: Any, *args: Any) -> Any:
        return _nothing_found(self)


class BypassingBelow(Bypassing):
    """Calls the lookup above its own, which is not vLLM's."""

    def get_computed_blocks(self, request: Any, *args: Any) -> Any:
        return super().get_computed_blocks(request, *args)


class Unreported(KVCacheManager):
    """Hands the statistics out without vLLM's own way of doing so."""

    def make_prefix_cache_stats(self) -> Any:
        return None


class Adding(KVCacheManager):
    """Adds to vLLM's lookup and admission."""

    def get_computed_blocks(self, request: Any, *args: Any) -> Any:
        self.looked_up = getattr(self, "looked_up", 0) + 1
        return super().get_computed_blocks(request, *args)

    def allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        return KVCacheManager.allocate_slots(self, request, *args, **kwargs)


def _nothing_found(manager: Any) -> Any:
    blocks = getattr(manager, "empty_kv_cache_blocks", None) or manager.create_empty_block_list()
    return (blocks, 0, 0) if vllm_release.NATIVELY_FIXED else (blocks, 0)


@pytest.fixture
def applied(outcome: str) -> None:
    """The fix is in place; only then can anybody bypass it."""
    if outcome != "applied":
        pytest.skip(f"vllm-prefix-stats is {outcome} on vLLM {vllm_release.VERSION}")


@pytest.fixture
def made_of(run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """Makes a scheduler whose manager is of another class, as a plugin does that replaces vLLM's class by its own."""

    def make(manager_class: Any, **options: Any) -> Run:
        monkeypatch.setattr(upstream, "KVCacheManager", manager_class)
        cache = run(**options)
        assert type(cache.manager) is manager_class
        return cache

    yield make
    monkeypatch.undo()
    # What was found is remembered until the fix is taken off.
    remove_all()
    apply_all("vllm")


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Warnings of kvmend, in the logger that vLLM's own lines go to."""
    lines: list[str] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == logging.WARNING:
                lines.append(record.getMessage())

    logger, handler = FIX.framework.log(), Noting()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    yield lines
    logger.setLevel(level)
    logger.removeHandler(handler)


def shadowed_by() -> list[str]:
    """What the report of this process says."""
    (found,) = [each["shadowed_by"] for each in report.snapshot()["fixes"] if each["fix"] == FIX.id]
    return list(found)


@pytest.mark.any_unit
@pytest.mark.parametrize(
    ("manager_class", "method"),
    [
        (Bypassing, "Bypassing.get_computed_blocks"),
        (BypassingBelow, "BypassingBelow.get_computed_blocks"),
        (Unreported, "Unreported.make_prefix_cache_stats"),
    ],
)
def test_a_manager_that_bypasses_the_fix_is_named_once_in_log_and_report(
    applied: None, made_of: Callable[..., Run], said: list[str], manager_class: Any, method: str
) -> None:
    """Catches a fix that says `applied` and does nothing, because somebody's manager never comes by it."""
    for _ in range(3):
        made_of(manager_class)
    name = f"test_shadowing.{method}"
    assert shadowed_by() == [name]
    assert len(said) == 1
    assert f"vllm-prefix-stats shadowed_by {name}" in said[0]
    (result,) = [each for each in applier.results() if each.fix == FIX.id]
    assert (result.outcome, result.shadowed_by) == (Outcome.APPLIED, (name,))
    assert f"shadowed_by {name}" in result.reason


def test_a_manager_that_adds_to_vllm_s_is_no_shadow_and_is_counted(
    made_of: Callable[..., Run], said: list[str]
) -> None:
    """Catches a false alarm, which would send people looking for a fault that is not there."""
    cache = made_of(Adding)
    cache.add("request", prompt(100), max_tokens=2)
    cache.finish()
    assert cache.manager.looked_up == 1
    assert (shadowed_by(), said) == ([], [])
    cache.must_have_counted(1, 100, 0)


@pytest.mark.any_unit
def test_vllm_s_own_manager_is_no_shadow(run: MakeRun, said: list[str]) -> None:
    """Catches an alarm in every server."""
    for hybrid in (False, True):
        if not hybrid or "connectors for hybrid models" not in vllm_release.LACKS:
            run(hybrid=hybrid)
    assert (shadowed_by(), said) == ([], [])


@pytest.mark.any_unit
@pytest.mark.parametrize("calls_ours", [False, True])
def test_a_function_that_another_plugin_puts_into_vllm_s_class_is_seen(
    applied: None, run: MakeRun, said: list[str], monkeypatch: pytest.MonkeyPatch, calls_ours: bool
) -> None:
    """Catches a patch over ours that leaves it out, which until then only somebody who reads the report would see."""
    ours = KVCacheManager.get_computed_blocks

    def theirs(self: Any, request: Any, *args: Any) -> Any:
        return _nothing_found(self)

    def theirs_over_ours(self: Any, request: Any, *args: Any) -> Any:
        return ours(self, request, *args)

    with monkeypatch.context() as patch:
        patch.setattr(KVCacheManager, "get_computed_blocks", theirs_over_ours if calls_ours else theirs)
        run()
        assert len(shadowed_by()) == len(said) == (0 if calls_ours else 1)
        (result,) = [each for each in applier.results() if each.fix == FIX.id]
        assert result.outcome is (Outcome.APPLIED if calls_ours else Outcome.CONFLICT)
    remove_all()
    apply_all("vllm")
    assert shadowed_by() == []


def test_a_coordinator_that_bypasses_the_inline_lookup_is_seen(
    applied: None, run: MakeRun, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a shadow at the one place of the fix that is not the manager's (0.24 - 0.26)."""
    if not vllm_release.INLINE_LOOKUP:
        pytest.skip(f"vLLM {vllm_release.VERSION} looks hybrid models up in the manager")
    from vllm.v1.core import kv_cache_coordinator as coordinators

    class Own(coordinators.HybridKVCacheCoordinator):  # type: ignore[misc, unused-ignore]
        """A lookup by group of its own."""

        def find_longest_cache_hit_per_group(self, *args: Any) -> Any:
            return None

    make = coordinators.get_kv_cache_coordinator

    def made(*args: Any, **kwargs: Any) -> Any:
        coordinator = make(*args, **kwargs)
        coordinator.__class__ = Own
        return coordinator

    monkeypatch.setattr(managers, "get_kv_cache_coordinator", made)
    run(hybrid=True)
    assert [name.rpartition(".")[2] for name in shadowed_by()] == ["find_longest_cache_hit_per_group"]
    remove_all()
    apply_all("vllm")


def test_a_manager_with_a_lookup_of_its_own_is_counted_for_a_loop_of_one_s_own(
    outcome: str, made_of: Callable[..., Run]
) -> None:
    """Catches a bypass of vllm-prefix-stats-copied-scheduler, which stands before the methods of any class."""
    if not vllm_release.NATIVELY_FIXED:
        pytest.skip(f"vLLM {vllm_release.VERSION} counts at the lookup, for every scheduler")
    before = COPIED.id in JOURNAL.entries
    assert applier.apply(COPIED).outcome is Outcome.APPLIED
    cache = made_of(Bypassing, scheduler_class=OwnLoop)
    cache.add("request", prompt(100), max_tokens=2)
    cache.finish()
    cache.must_have_counted(1, 100, 0)
    if not before:
        applier.remove(COPIED.id)
