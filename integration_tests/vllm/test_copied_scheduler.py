"""vllm-prefix-stats-copied-scheduler: a scheduler with a loop of its own is counted as vLLM's is.

Below 0.27 the lookup counts, whatever the scheduler, and `vllm-prefix-stats` sees to it: there the same tests must
pass without this fix.
"""

from __future__ import annotations

import ast
import inspect
import random
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import vllm_release
from runs import Run, prompt
from schedulers import Noting, OwnLoop
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import scheduler as upstream
from vllm.v1.core.sched.scheduler import Scheduler

from kvmend import applier
from kvmend.journal import JOURNAL
from kvmend.outcome import Outcome
from kvmend_fixes.vllm.copied_scheduler import FIX

MakeRun = Callable[..., Run]
RECORD = "record_prefix_cache_stats"
needs_the_fix = pytest.mark.skipif(
    not vllm_release.NATIVELY_FIXED, reason=f"vLLM {vllm_release.VERSION} counts at the lookup, for every scheduler"
)


@pytest.fixture(autouse=True)
def _in_force(outcome: str) -> Iterator[None]:
    """The fix is on, as it is in every process that loads kvmend, and afterwards as it was."""
    before = FIX.id in JOURNAL.entries
    wanted = Outcome.APPLIED if vllm_release.NATIVELY_FIXED else Outcome.NOT_AFFECTED
    result = applier.apply(FIX)
    assert result.outcome is wanted, result.reason
    yield
    if not before:
        applier.remove(FIX.id)


def counted() -> dict[str, int]:
    return JOURNAL.entries[FIX.id].counters.as_dict()


def own_attributes(manager: Any) -> set[str]:
    """Methods that this one manager has beside those of its class."""
    return {name for name, value in vars(manager).items() if inspect.isfunction(value)}


class _Forgetting(ast.NodeTransformer):
    """Takes the counting out of a scheduling loop."""

    taken = 0

    def visit_If(self, node: ast.If) -> Any:
        (only,) = node.body if len(node.body) == 1 else (None,)
        if isinstance(only, ast.Expr) and RECORD in ast.dump(only):
            self.taken += 1
            return None
        return self.generic_visit(node)


def copied() -> Any:
    """A scheduler class whose `schedule()` is a copy of the installed one without the counting, made here and now."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(Scheduler.schedule)))
    forgetting = _Forgetting()
    tree = ast.fix_missing_locations(forgetting.visit(tree))
    assert forgetting.taken == int(vllm_release.NATIVELY_FIXED)
    scope = {**vars(upstream), "__name__": "copied"}
    exec(compile(tree, "copied.py", "exec"), scope)
    return type("Copied", (Scheduler,), {"schedule": scope["schedule"], "__module__": "copied"})


def test_the_same_prompt_five_times_is_looked_up_five_times(run: MakeRun) -> None:
    """Catches the report as filed: five runs of 5,457 tokens, found four times, and every counter at 0."""
    cache = run(scheduler_class=OwnLoop, block_size=128)
    for number in range(5):
        cache.add(f"run {number}", prompt(5457), max_tokens=2)
        cache.finish()
    cache.must_have_counted(5, 5 * 5457, 4 * 5376)


@pytest.mark.shows_fault
def test_a_refused_request_is_counted_when_it_is_admitted(run: MakeRun) -> None:
    """Catches a count per lookup: the second request is looked up at every step until the first one has ended."""
    cache = run(scheduler_class=OwnLoop, num_blocks=1 + 8)
    cache.add("holds the blocks", prompt(100), max_tokens=10)
    cache.add("waits", prompt(100, seed=1), max_tokens=2)
    cache.step(3)
    cache.must_have_counted(1, 100, 0)
    cache.finish()
    assert len(cache.scheduler.lookups) > 8
    cache.must_have_counted(2, 200, 0)


@pytest.mark.parametrize("hybrid", [False, True], ids=["attention", "hybrid"])
@pytest.mark.parametrize("connector", [False, True], ids=["alone", "connector"])
def test_a_copy_of_vllm_s_loop_counts_what_vllm_s_own_counts(run: MakeRun, connector: bool, hybrid: bool) -> None:
    """Catches any count more or less than vLLM's own: deferrals, refusals, preemptions, loads, in random traffic."""
    if connector:
        vllm_release.need("connectors that defer")
    if hybrid:
        vllm_release.need("connectors for hybrid models")
    seen = 0
    for seed in range(12):
        both = [
            _traffic(run, seed, scheduler_class=scheduler_class, connector=connector, hybrid=hybrid)
            for scheduler_class in (Scheduler, copied())
        ]
        assert both[0] == both[1], seed
        seen += both[0]["hits"]
    assert seen > 0


def _traffic(run: MakeRun, seed: int, **options: Any) -> dict[str, int]:
    """What a scheduler counts in the course of some random requests, and how many tokens it scheduled for them."""
    chance = random.Random(seed)
    # A pool that is too small for everybody, but for hybrid models: 0.33 stops with an error when theirs is empty.
    cache = run(num_blocks=1 + (400 if options["hybrid"] else 40), max_num_batched_tokens=256, **options)
    scheduled = 0
    for number in range(25):
        answers: list[Any] = []
        if options["connector"]:
            answers = [*[None] * chance.randrange(4), (chance.choice((0, 0, 16, 64)), False)]
        tokens = prompt(chance.randrange(20, 200), shared=chance.choice((0, 16, 20)), seed=chance.randrange(5))
        cache.add(f"request {number}", tokens, *answers, max_tokens=chance.randrange(1, 60))
        for _ in range(chance.randrange(5)):
            scheduled += sum(cache.step().scheduled.values())
        if chance.random() < 0.1:
            cache.abort(f"request {chance.randrange(number + 1)}")
    cache.finish()
    cache.take_the_rest()
    return {**dict.fromkeys(("hits", "queries"), 0), **cache.local, "scheduled": scheduled}


def test_an_asynchronous_load_is_counted_once(run: MakeRun) -> None:
    """Catches a second count when the load is in and the request gets its slots again."""
    cache = run(scheduler_class=copied(), connector=True)
    cache.add("loads", prompt(100), (64, True), max_tokens=2)
    cache.step(3)
    cache.must_have_counted(1, 100, 0)
    cache.step(loaded=["loads"])
    cache.finish()
    cache.must_have_counted(1, 100, 0)


def test_a_preempted_request_is_counted_apart(run: MakeRun) -> None:
    """Catches a resumed request in the counters that dashboards read."""
    vllm_release.need("counts of preempted requests")
    cache = run(scheduler_class=copied(), num_blocks=1 + 14)
    for number in range(2):
        cache.add(f"request {number}", prompt(100, seed=number), max_tokens=40)
    cache.step_until_preempted("request 1")
    cache.finish()
    cache.must_have_counted(2, 200, 0)
    assert cache.local["preempted_requests"] >= 1


@pytest.mark.parametrize("scheduler_class", [*vllm_release.SCHEDULERS.values(), Noting], ids=lambda each: each.__name__)
def test_vllm_s_own_schedulers_and_what_inherits_from_them_run_as_released(run: MakeRun, scheduler_class: Any) -> None:
    """Catches a wrapper in the way of everybody, and a second count beside vLLM's own."""
    cache = run(scheduler_class=scheduler_class)
    assert own_attributes(cache.manager) == set()
    cache.add("first", prompt(100), max_tokens=2)
    cache.finish()
    cache.add("second", prompt(100), max_tokens=2)
    cache.finish()
    cache.must_have_counted(2, 200, 96)


class _Counting(OwnLoop):
    """Counts what it admits, as the maintainers of such a scheduler will in the end."""

    unseen = False

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        before = len(self.__dict__.get("lookups", ()))
        output = super().schedule(*args, **kwargs)
        new = list(output.scheduled_new_reqs)[-(len(self.lookups) - before) :] if len(self.lookups) > before else []
        for row in new:
            self._count(self.requests[row.req_id], row.num_computed_tokens)
        return output

    def _count(self, request: Any, hits: int) -> None:
        self.kv_cache_manager.record_prefix_cache_stats(request, hits)


class _CountingUnseen(_Counting):
    """The same, by a name that its code does not show."""

    def _count(self, request: Any, hits: int) -> None:
        getattr(self.kv_cache_manager, "_".join(("record", "prefix", "cache", "stats")))(request, hits)


@needs_the_fix
@pytest.mark.parametrize(
    ("scheduler_class", "left_out"), [(_Counting, 0), (_CountingUnseen, 2)], ids=["seen", "unseen"]
)
def test_a_loop_of_one_s_own_that_counts_is_counted_once(run: MakeRun, scheduler_class: Any, left_out: int) -> None:
    """Catches a second count, of both the kind that can be foreseen and the kind that cannot."""
    before = counted()["left_out"]
    cache = run(scheduler_class=scheduler_class)
    assert bool(own_attributes(cache.manager)) == bool(left_out)
    for name in ("first", "second"):
        cache.add(name, prompt(100), max_tokens=2)
        cache.finish()
    cache.must_have_counted(2, 200, 96)
    assert counted()["left_out"] - before == left_out


@needs_the_fix
def test_only_the_constructor_of_the_manager_is_touched() -> None:
    """Catches a wrapper on a method that every step of every scheduler calls."""
    touched = {
        name
        for name, value in vars(KVCacheManager).items()
        if inspect.isfunction(value) and value.__code__.co_filename != inspect.getfile(KVCacheManager)
    }
    assert touched == {"__init__"}


@needs_the_fix
def test_taken_off_a_running_scheduler_counts_nothing_more_and_put_on_again_a_new_one_is_counted(run: MakeRun) -> None:
    """Catches a removal that does not reach managers already made, and a fix that works only once."""
    cache = run(scheduler_class=OwnLoop)
    cache.add("counted", prompt(100), max_tokens=2)
    cache.finish()
    was_on = applier.remove(FIX.id)
    assert was_on is not None
    assert was_on.outcome is Outcome.DISABLED
    assert own_attributes(cache.manager) == set()
    cache.add("not counted", prompt(100), max_tokens=2)
    cache.finish()
    cache.must_have_counted(1, 100, 0)
    applier.apply(FIX)
    cache = run(scheduler_class=OwnLoop)
    cache.add("counted", prompt(100), max_tokens=2)
    cache.finish()
    cache.must_have_counted(1, 100, 0)


@pytest.mark.parametrize("option", ["enable_caching", "log_stats"])
def test_with_caching_or_statistics_off_a_loop_of_one_s_own_counts_nothing(run: MakeRun, option: str) -> None:
    """Catches counts of lookups that are none, and a scheduler that stops because there is nothing to count into."""
    cache = run(scheduler_class=OwnLoop, **{option: False})
    cache.add("request", prompt(100), max_tokens=2)
    cache.finish()
    cache.must_have_counted(0, 0, 0)
