"""What the installed vLLM release can do, read from its classes, not from its version."""

from __future__ import annotations

import inspect
from typing import Any

import vllm
from kvmend_fixes.proofs import _vllm_rig as rig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import PrefixCacheStats

VERSION = str(vllm.__version__)

#: 0.27.0 and later record at admission, in `schedule()`; there kvmend has nothing to do.
NATIVELY_FIXED = hasattr(KVCacheManager, "record_prefix_cache_stats")

#: 0.11.1 and later count preempted requests apart; earlier ones count them with all others.
COUNTS_PREEMPTED = hasattr(PrefixCacheStats(), "preempted_requests")

#: 0.11.1 and later count what a connector finds.
COUNTS_EXTERNAL = "connector_prefix_cache_stats" in inspect.getsource(Scheduler.make_stats)

#: 0.11.1 and later take a connector for a model with several block tables.
HYBRID_WITH_CONNECTOR = "Multiple KV cache groups are not" not in inspect.getsource(Scheduler.__init__)

#: 0.24 - 0.26 look hybrid models with a connector up in `schedule()` itself and record there.
INLINE_LOOKUP = "find_longest_cache_hit_per_group" in inspect.getsource(Scheduler.schedule)

#: Every scheduler class of vLLM's own, by name.
SCHEDULERS: dict[str, Any] = {"Scheduler": Scheduler}
if (found := rig.async_scheduler_class()) is not None:
    SCHEDULERS["AsyncScheduler"] = found
