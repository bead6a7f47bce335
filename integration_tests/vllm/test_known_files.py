"""The installed release is judged at start-up by its files alone."""

from __future__ import annotations

import pytest

from kvmend.api import Fix
from kvmend.locate import locate_installed
from kvmend_fixes.vllm import VLLM, copied_scheduler, prefix_stats
from support.verdicts import told_by_files


@pytest.mark.any_unit
@pytest.mark.parametrize("fix", [prefix_stats.FIX, copied_scheduler.FIX], ids=lambda fix: str(fix.id))
def test_the_table_says_of_the_files_what_the_probe_says_of_the_source(fix: Fix) -> None:
    """Catches a table that was not made anew after a change of the probe, or that lacks this release's files."""
    installation = locate_installed(VLLM)
    assert installation is not None
    assert told_by_files(fix, installation)
