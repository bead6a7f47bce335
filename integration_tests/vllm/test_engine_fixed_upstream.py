"""The real engine of a release that counts at admission by itself, with vLLM's scheduler and with a user's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import COPIED, FIX, NO_GROWTH, SENT, TRUE_HITS, run, without_and_with

pytestmark = pytest.mark.engine(release="0.27.1")


def test_vllm_s_own_scheduler_counts_right_and_is_left_alone(tmp_path: Path) -> None:
    """Catches a second count beside upstream's, and a scheduler that is helped although it counts by itself."""
    ran = run(tmp_path, multiprocessing=False, variables={"KVMEND_STRICT": "1"})
    assert ran.counted == (SENT, TRUE_HITS, TRUE_HITS)
    assert ran.members == (ran.root,)
    assert ran.root.outcomes == {FIX: "already_fixed", COPIED: "applied"}
    counted = {name: number for each in ran.root.counters.values() for name, number in each.items() if number}
    assert counted == {}


def test_a_scheduler_with_a_loop_of_its_own_counts_nothing_without_the_fix_and_right_with_it(tmp_path: Path) -> None:
    """Catches counters that stay at 0 for ever, and a count for each of the refused admissions."""
    scheduler = "engine_schedulers.FirstComeFirstServed"
    without, mended = without_and_with(tmp_path, NO_GROWTH, multiprocessing=False, scheduler_cls=scheduler)
    assert without.counted == (0, 0, TRUE_HITS)
    assert mended.counted == (SENT, TRUE_HITS, TRUE_HITS)
    assert mended.root.outcomes == {FIX: "already_fixed", COPIED: "applied"}
    assert mended.root.counters[COPIED] == {"schedulers": 1, "settled": 48, "left_out": 0}
