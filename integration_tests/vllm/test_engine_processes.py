"""Every kind of process that vLLM makes, on the real engine: the fix is in each that schedules, and counts right.

Each test sends 8,064 prompt tokens to an engine whose KV blocks run out, or says what else has it look up again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import FIX, SENT, TRUE_HITS, run, without_and_with

from kvmend_fixes.demos._scenarios import DEFERRALS, DEFERRING_CONNECTOR

pytestmark = pytest.mark.engine


def test_with_everything_in_one_process_there_is_one_report_and_it_shows_the_fix_at_work(tmp_path: Path) -> None:
    """Catches a fix that is applied, and settles nothing. How wrong this engine is without it, the demo's tests say."""
    ran = run(tmp_path, multiprocessing=False)
    assert ran.counted == (SENT, TRUE_HITS, TRUE_HITS)
    assert ran.members == (ran.root,)
    assert ran.root.outcomes[FIX] == "applied"
    counters = ran.root.counters[FIX]
    # 48 admissions, and a few more of preempted requests, which are counted apart.
    assert counters["settled"] >= 48
    assert counters["held"] == counters["settled"] + counters["dropped"]
    assert counters["dropped"] > 48


def test_a_forked_engine_core_and_its_forked_worker_count_right(tmp_path: Path) -> None:
    """Catches a fix that is lost, or put on twice, where a child has its parent's memory and loads no plugin again."""
    without, mended = without_and_with(tmp_path, plugins={"fork": "engine_plugins:fork"})
    assert mended.counted == (SENT, TRUE_HITS, TRUE_HITS)
    assert without.reading.queries > 2 * SENT
    assert without.reading.true_hits == TRUE_HITS
    (core,) = mended.children(mended.root)
    assert (core.forked_from, core.inherited) == (mended.root.pid, True)
    assert core.outcomes[FIX] == "applied"
    # A forked child that has nothing of its own to tell reports only once it has lived for a while.
    for worker in mended.workers():
        assert (worker.forked_from, worker.inherited) == (core.pid, True)


def test_with_tensor_parallelism_the_one_scheduler_counts_once_for_both_workers(tmp_path: Path) -> None:
    """Catches counts per rank, and a worker that the plugin keeps from starting, also under KVMEND_STRICT=1."""
    without, mended = without_and_with(tmp_path, variables={"KVMEND_STRICT": "1"}, tensor_parallel_size=2)
    assert mended.counted == (SENT, TRUE_HITS, TRUE_HITS)
    assert without.reading.queries > 2 * SENT
    (core,) = mended.children(mended.root)
    assert core.outcomes[FIX] == "applied"
    assert len(mended.workers()) == 2
    # Armed is a process that has not imported the scheduler, and so has nothing to mend.
    assert {each.outcomes[FIX] for each in mended.workers()} <= {"applied", "armed"}
    assert {each.outcomes[FIX] for each in without.members} == {"disabled"}


def test_with_data_parallelism_the_server_sums_up_what_each_engine_core_counts_right(tmp_path: Path) -> None:
    """Catches an API server that loads the plugin while one of its two engine cores does not.

    Each request is deferred three times, however fast requests come: two cores may never run out of KV blocks.
    """
    without, mended = without_and_with(tmp_path, DEFERRING_CONNECTOR, transport="http", data_parallel_size=2)
    assert mended.reading.queries == SENT
    # Each core has its own cache, and how requests are spread over the two is a matter of timing.
    assert mended.reading.hits == mended.reading.true_hits
    assert without.reading.queries == (DEFERRALS + 1) * SENT
    cores = [each for each in mended.children(mended.root) if mended.children(each)]
    assert [each.outcomes[FIX] for each in cores] == ["applied", "applied"]
    assert len(mended.workers()) == 2
    assert mended.root.outcomes[FIX] in ("applied", "armed")
