"""An independent account of prefix-cache lookups: who was admitted, with how many tokens, and what was found.

The ledger knows nothing of kvmend and calls none of vLLM's counting code. It watches a scheduler from outside: the
status of each request before and after `schedule()`, the `SchedulerOutput`, and what the connector was told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvmend_fixes.proofs import _vllm_rig as rig

_WAITING = ("WAITING", "PREEMPTED")
_LOADING = "WAITING_FOR_REMOTE_KVS"
_RUNNING = "RUNNING"


class Ledger:
    """Counts what vLLM should have counted.

    Args:
        scheduler: As `rig.build_scheduler` made it.
        apart: Whether preempted requests are counted under `preempted_*`, as releases from 0.11.1 on do.

    Attributes:
        counts: Counter name to value, the names being those of `PrefixCacheStats`.
        seen: How often what happened, for tests that want to know whether anything did.
    """

    def __init__(self, scheduler: Any, *, apart: bool) -> None:
        self.scheduler = scheduler
        self.counts: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self._apart = apart
        self._exempt: set[str] = set()
        self._preempted: set[str] = set()
        self._loading: set[str] = set()
        self._before: dict[str, str] = {}

    def exempt(self, request_id: str) -> None:
        """This request may not read the prefix cache, so that there is nothing to count."""
        self._exempt.add(request_id)

    def before_schedule(self) -> None:
        """To be called right before `schedule()`."""
        self._before = self._statuses()
        self._preempted.update(id_ for id_, status in self._before.items() if status == "PREEMPTED")

    def after_schedule(self, output: Any) -> None:
        """To be called right after `schedule()`, before its output is fed back."""
        computed = rig.computed_before(output)
        for request_id, status in self._statuses().items():
            before = self._before[request_id]
            if before == _RUNNING and status == "PREEMPTED":
                self.seen["preempted"] += 1
            elif before in _WAITING and status == before:
                self.seen["left waiting"] += 1
            elif before in (*_WAITING, _LOADING) and status == _RUNNING:
                if request_id in self._loading:
                    # Admitted when its load began; these are the slots for the rest of its prompt.
                    self._loading.discard(request_id)
                else:
                    self._admit(request_id, computed[request_id] - self._granted(request_id))
            elif before in _WAITING and status == _LOADING:
                self.seen["loading"] += 1
                self._loading.add(request_id)
                self._admit(request_id, self.scheduler.connector.told[request_id])

    def _admit(self, request_id: str, found: int) -> None:
        if request_id in self._exempt:
            self.seen["exempt"] += 1
            return
        resumed = request_id in self._preempted
        self.seen["resumed" if resumed else "admitted"] += 1
        self.seen["admitted with hits"] += found > 0
        prefix = "preempted_" if self._apart and resumed else ""
        self.counts[f"{prefix}requests"] += 1
        self.counts[f"{prefix}queries"] += self.scheduler.requests[request_id].num_tokens
        self.counts[f"{prefix}hits"] += found

    def _granted(self, request_id: str) -> int:
        """Tokens that the connector brings in, which are no hit of the local cache.

        From 0.31 on nobody asks it about a request that may not read the prefix cache.
        """
        connector = self.scheduler.connector
        return 0 if connector is None else int(connector.granted.get(request_id, 0))

    def _statuses(self) -> Mapping[str, str]:
        return {id_: request.status.name for id_, request in self.scheduler.requests.items()}
