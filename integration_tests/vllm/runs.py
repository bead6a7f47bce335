"""A scheduler under test and what it has counted."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

import vllm_release

from kvmend_fixes.proofs import _vllm_rig as rig


class Miscounted(AssertionError):
    """The counters are wrong; the only way in which a test may fail without the fix."""


class Run:
    """A scheduler of the installed release, its requests, and the counters of all its steps together.

    Attributes:
        scheduler: As `rig.build_scheduler` made it.
        requests: By id, also those that have ended.
        local: Counters of the local prefix cache, summed over all steps.
        external: The same of the connector.
        admitted: Ids in the order in which they were first given tokens to compute.
    """

    def __init__(self, **options: Any) -> None:
        self.scheduler = rig.build_scheduler(**options)
        self.requests: dict[str, Any] = {}
        self.local: Counter[str] = Counter()
        self.external: Counter[str] = Counter()
        self.admitted: list[str] = []

    @property
    def manager(self) -> Any:
        """The KV cache manager."""
        return self.scheduler.kv_cache_manager

    def add(self, request_id: str, token_ids: Sequence[int], *answers: rig.Answer, **options: Any) -> Any:
        """A new request in the waiting queue; `answers` are the connector's, the last one for ever."""
        request = rig.make_request(self.scheduler, request_id, token_ids, **options)
        self.requests[request_id] = request
        if None in answers:
            vllm_release.need("connectors that defer")
        if any(answer and answer[1] for answer in answers):
            hybrid = len(self.scheduler.kv_cache_config.kv_cache_groups) > 1
            vllm_release.need(
                "asynchronous loads for hybrid models" if hybrid else "connectors that load asynchronously"
            )
        if answers:
            self.scheduler.connector.script[request_id] = list(answers)
        self.scheduler.add_request(request)
        return request

    def step(self, times: int = 1, *, loaded: Iterable[str] = ()) -> rig.Step:
        """Schedules and feeds back, `times` times; `loaded` has come in by the first of them."""
        for _ in range(times):
            step = rig.step(self.scheduler, loaded=loaded)
            loaded = ()
            self.take(step)
        return step

    def take(self, step: rig.Step) -> None:
        """Sums up what a step reported."""
        self.local.update(step.local or {})
        self.external.update(step.external or {})
        self.admitted.extend(id_ for id_ in step.scheduled if id_ not in self.admitted)

    def take_the_rest(self) -> None:
        """What no step has reported yet: up to 0.9, a step in which nobody has a token to show reports nothing."""
        local, external = rig.take_stats(self.scheduler)
        self.local.update(local or {})
        self.external.update(external or {})

    def finish(self, *request_ids: str, limit: int = 2000) -> None:
        """Steps until these requests have ended, or all of them if none is named."""
        for _ in range(limit):
            if not any(id_ in self.scheduler.requests for id_ in request_ids or self.requests):
                return
            self.step()
        raise TimeoutError(f"{request_ids or tuple(self.requests)} did not end in {limit} steps")

    def step_until_preempted(self, request_id: str, limit: int = 100) -> None:
        """Steps until this request has lost its blocks to another one."""
        for _ in range(limit):
            if self.requests[request_id].status.name == "PREEMPTED":
                return
            self.step()
        raise TimeoutError(f"{request_id} was not preempted in {limit} steps")

    def run_ahead(self, *, depth: int, limit: int = 2000) -> None:
        """Runs every request to its end as vLLM's asynchronous engine does: `depth` steps planned before an output."""
        planned: deque[Any] = deque()
        for _ in range(limit):
            if not planned and not self.scheduler.requests:
                return
            if len(planned) < depth and self.scheduler.requests:
                planned.append(self.scheduler.schedule())
            else:
                self.take(rig.finish_step(self.scheduler, planned.popleft()))
        raise TimeoutError(f"{tuple(self.scheduler.requests)} did not end")

    def abort(self, request_id: str) -> None:
        """The client hangs up."""
        rig.abort(self.scheduler, request_id)

    def must_have_counted(self, requests: int, queries: int, hits: int) -> None:
        """Requests, queried tokens and found tokens so far; a release that counts preempted ones apart without them."""
        self._compare("counted", self._counted(""), (requests, queries, hits))

    def must_have_counted_preempted(self, requests: int, queries: int, hits: int) -> None:
        """The same of requests that had been preempted, in releases that count them apart."""
        self._compare("counted as preempted", self._counted("preempted_"), (requests, queries, hits))

    def must_have_counted_in_all(self, requests: int, queries: int, hits: int) -> None:
        """Both together, which every release can be asked for."""
        plain, apart = self._counted(""), self._counted("preempted_")
        both = tuple(one + other for one, other in zip(plain, apart, strict=True))
        self._compare("counted in all", both, (requests, queries, hits))

    def _counted(self, prefix: str) -> tuple[int, ...]:
        self.take_the_rest()
        return tuple(self.local[f"{prefix}{name}"] for name in ("requests", "queries", "hits"))

    def _compare(self, what: str, found: tuple[int, ...], right: tuple[int, ...]) -> None:
        if found != right:
            raise Miscounted(f"{what}: (requests, queries, hits) are {found}, right is {right}")


def probe_when_asked(run: Run, probed: Any) -> None:
    """From now on the connector looks a request up in the local cache before it answers about another."""
    connector = run.scheduler.connector
    answer = connector.get_num_new_matched_tokens

    def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> Any:
        run.manager.get_computed_blocks(probed)
        return answer(request, num_computed_tokens)

    connector.get_num_new_matched_tokens = get_num_new_matched_tokens


def prompt(tokens: int, *, shared: int = 0, seed: int = 0) -> list[int]:
    """Token ids of a prompt: the first `shared` are the same for every seed, the others are the seed's own."""
    own = range(100_000 * (seed + 1), 100_000 * (seed + 1) + tokens - shared)
    return [*range(shared), *own]
