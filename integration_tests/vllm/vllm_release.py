"""What the installed vLLM release can do, read from its classes, not from its version."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import vllm
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import scheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request

from kvmend_fixes.proofs import _vllm_rig as rig

VERSION = str(vllm.__version__)

#: 0.27.0 and later record at admission, in `schedule()`; there kvmend has nothing to do.
NATIVELY_FIXED = hasattr(KVCacheManager, "record_prefix_cache_stats")

#: Queries and hits are tokens; 0.8.5 counts blocks.
COUNTS_TOKENS = "queries += len(" not in inspect.getsource(KVCacheManager.get_computed_blocks)

#: Preempted requests are counted apart, not with all others.
COUNTS_PREEMPTED = hasattr(PrefixCacheStats(), "preempted_requests")

#: What a connector finds is counted.
COUNTS_EXTERNAL = "connector_prefix_cache_stats" in inspect.getsource(Scheduler.make_stats)

#: A connector may answer None, and loads may be asynchronous.
CONNECTOR_DEFERS = rig.connector_can_defer()
CONNECTOR_LOADS = hasattr(Scheduler, "_update_waiting_for_remote_kv")

#: A connector goes with a model that has several block tables; and so do its asynchronous loads.
HYBRID_WITH_CONNECTOR = COUNTS_EXTERNAL and "Multiple KV cache groups are not" not in inspect.getsource(
    Scheduler.__init__
)
HYBRID_LOADS = HYBRID_WITH_CONNECTOR and not re.search(
    r"\(block_ids,\s*\) =", inspect.getsource(Scheduler._update_waiting_for_remote_kv)
)

#: Hybrid models with a connector are looked up in `schedule()` itself, which records there.
INLINE_LOOKUP = "find_longest_cache_hit_per_group" in inspect.getsource(Scheduler.schedule)

#: A prompt may be kept whole.
WHOLE_PROMPTS = re.search("chunked_prefill_enabled|enable_chunked_prefill", inspect.getsource(scheduler)) is not None

#: A request that waits can be aborted where there is a connector; 0.9.0 asserts there that it has blocks.
ABORTS_WAITING = not hasattr(KVCacheManager, "get_block_ids") or "assert" not in inspect.getsource(
    KVCacheManager.get_block_ids
)

#: Every scheduler class of vLLM's own, by name.
SCHEDULERS: dict[str, Any] = {"Scheduler": Scheduler}
if (found := rig.async_scheduler_class()) is not None:
    SCHEDULERS["AsyncScheduler"] = found

#: What tests have to do without on this release. pins.toml says the same of each release, and a test compares.
LACKS = {
    name
    for name, there in {
        "asynchronous scheduler": "AsyncScheduler" in SCHEDULERS,
        "counts of preempted requests": COUNTS_PREEMPTED,
        "counts of external hits": COUNTS_EXTERNAL,
        "connectors that defer": CONNECTOR_DEFERS,
        "connectors that load asynchronously": CONNECTOR_LOADS,
        "connectors for hybrid models": HYBRID_WITH_CONNECTOR,
        "asynchronous loads for hybrid models": HYBRID_LOADS,
        "prompts that are kept whole": WHOLE_PROMPTS,
        "aborts of waiting requests beside a connector": ABORTS_WAITING,
        "streaming sessions": "resumable" in inspect.signature(Request.__init__).parameters,
    }.items()
    if not there
}


def need(what: str) -> None:
    """Skips a test, with the reason, on a release that lacks what the test is about."""
    if what in LACKS:
        pytest.skip(f"vLLM {VERSION} has no {what}")
