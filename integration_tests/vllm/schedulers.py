"""Scheduler classes of a user's own. Nothing in them is vLLM's beyond the names they call."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from kvmend_fixes.proofs._vllm_own_loop import own_loop


class Noting(Scheduler):
    """Adds to vLLM's scheduler: notes how long its queue was."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.noted = [*getattr(self, "noted", []), len(self.waiting)]
        return super().schedule(*args, **kwargs)


#: Has a loop of its own; on a natively fixed release it counts nothing by itself.
OwnLoop = own_loop()
