"""Where vLLM's V1 scheduler keeps what the fixes of its statistics judge."""

from __future__ import annotations

from kvmend.api import UNKNOWN, BodySource, Finding, Sources

MANAGER = "vllm.v1.core.kv_cache_manager"
SCHEDULER = "vllm.v1.core.sched.scheduler"


def counting_bodies(sources: Sources) -> tuple[BodySource, BodySource, BodySource] | Finding:
    """The lookup, the admission and `schedule()`, or a finding that says which of them is missing."""
    lookup = sources.body(MANAGER, "KVCacheManager.get_computed_blocks")
    admission = sources.body(MANAGER, "KVCacheManager.allocate_slots")
    schedule = sources.body(SCHEDULER, "Scheduler.schedule")
    if lookup is None or admission is None or schedule is None:
        missing = "get_computed_blocks" if lookup is None else "allocate_slots" if admission is None else "schedule"
        return Finding(state=UNKNOWN, reason=f"there is no {missing} where vLLM's V1 scheduler keeps it")
    return lookup, admission, schedule
