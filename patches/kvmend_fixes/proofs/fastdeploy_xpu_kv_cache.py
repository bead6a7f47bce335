"""Before and after of fastdeploy-xpu-kv-cache, on the installed FastDeploy and without any device.

Every configuration is started with FastDeploy's own code (`_xpu_rig`), and the creators of its KV tensors are counted.
"""

from __future__ import annotations

import itertools

from kvmend.api import Case
from kvmend_fixes.proofs._xpu_rig import Rig, Setup

ROLES = ("mixed", "prefill", "decode")
CPU_BLOCKS = (0, 8)
STORAGES = (None, "attention_store", "mooncake")


def table(**others: bool) -> list[Setup]:
    """The 18 configurations: role by swap space by storage backend."""
    return [
        Setup(role=role, cpu_blocks=blocks, storage=storage, **others)
        for role, blocks, storage in itertools.product(ROLES, CPU_BLOCKS, STORAGES)
    ]


def without_prefix_caching(**others: bool) -> list[Setup]:
    """The configurations that a server without prefix caching takes: no storage backend."""
    return [setup for setup in table(prefix_caching=False, **others) if setup.storage is None]


def measure() -> list[Case]:
    """Creators of the KV tensors in each configuration, and the bytes that all of them create together."""
    rig = Rig()
    setups = table() + without_prefix_caching()
    if rig.has_mtp:
        setups += table(mtp=True) + without_prefix_caching(mtp=True)
    cases, created = [], 0
    for number, setup in enumerate(setups):
        started = rig.start(setup)
        counts = sorted(started.creator_counts) if not started.waiting else [0]
        cases.append(Case(name=setup.name, expected=1, measured=counts[0] if len(counts) == 1 else max(counts)))
        created += started.bytes if number < len(table()) else 0
    once = rig.start(Setup()).bytes
    name = "MiB of KV tensors created in the first 18 configurations, of which one needs " + str(once >> 20)
    return [*cases, Case(name=name, expected=len(table()) * once >> 20, measured=created >> 20)]
