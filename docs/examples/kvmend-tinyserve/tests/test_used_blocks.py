"""Run in an environment that has tinyserve, kvmend and this package."""

from __future__ import annotations

from kvmend_tinyserve.used_blocks import FIX
from tinyserve.pool import BlockPool

from kvmend.applier import apply, remove
from kvmend.outcome import Outcome


def test_a_refused_allocation_is_not_counted() -> None:
    assert apply(FIX).outcome is Outcome.APPLIED
    pool = BlockPool(num_blocks=1)
    assert pool.allocate(2) is None
    assert pool.used == 0
    remove(FIX.id)
    assert pool.allocate(2) is None
    assert pool.used == 2
