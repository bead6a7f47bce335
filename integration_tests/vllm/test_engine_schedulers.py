"""Schedulers of a user's own (`--scheduler-cls`) on the real engine of the last affected release."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import COPIED, FIX, NO_GROWTH, SENT, TRUE_HITS, without_and_with

pytestmark = pytest.mark.engine


def test_a_subclass_of_vllm_s_default_scheduler_counts_right(tmp_path: Path) -> None:
    """Catches a fix that knows vLLM's own class only."""
    without, mended = without_and_with(tmp_path, multiprocessing=False, scheduler_cls="engine_schedulers.Noting")
    assert without.counted == (18_312, 13_824, TRUE_HITS)
    assert mended.counted == (SENT, TRUE_HITS, TRUE_HITS)
    assert mended.root.outcomes[FIX] == "applied"


def test_a_scheduler_with_a_loop_of_its_own_counts_right(tmp_path: Path) -> None:
    """Catches a fix that sits in `schedule()`, and a second count by the fix that is for later releases."""
    scheduler = "engine_schedulers.FirstComeFirstServed"
    without, mended = without_and_with(tmp_path, NO_GROWTH, multiprocessing=False, scheduler_cls=scheduler)
    assert without.counted == (24_192, 18_304, TRUE_HITS)
    assert mended.counted == (SENT, TRUE_HITS, TRUE_HITS)
    assert mended.root.outcomes == {FIX: "applied", COPIED: "not_affected"}
