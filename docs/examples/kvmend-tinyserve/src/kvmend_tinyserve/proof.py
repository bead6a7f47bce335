"""Before and after of tinyserve-used-blocks. `kvmend verify` runs it twice, each time in a process of its own."""

from __future__ import annotations

from kvmend.api import Case


def measure() -> list[Case]:
    """A pool of four blocks that refuses two of four requests."""
    from tinyserve.pool import BlockPool

    pool = BlockPool(num_blocks=4)
    for _ in range(4):
        pool.allocate(2)
    return [Case(name="4 of 8 blocks granted: blocks in use", expected=4, measured=pool.used)]
