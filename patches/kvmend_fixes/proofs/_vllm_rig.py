"""A real vLLM scheduler on any release, without a model, a network or an accelerator.

Everything that counts prefix-cache lookups is vLLM's own: `Scheduler` (or any class given), `KVCacheManager`, the
statistics objects and the way through `schedule()` and `update_from_output()`. Ours are a stand-in for the model
configuration, a KV connector that answers from a script, and the sampled tokens. vLLM is imported inside the
functions only, so that a process can import this module before it has decided what to do with vLLM.

The parts that a scheduler is built from are in `_vllm_parts`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvmend_fixes.proofs import _vllm_parts as parts

#: What a connector says of a request: how many tokens it can load and whether it does so asynchronously, or None for
#: "ask again later".
Answer = tuple[int, bool] | None

#: The counters of `PrefixCacheStats`; 0.8.5 - 0.11.0 have the first three only.
COUNTERS = ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One scheduling step.

    Attributes:
        output: vLLM's `SchedulerOutput`.
        local: Counters of the local prefix cache that this step reported, or None if statistics are off.
        external: The same of the connector, or None if there is none or the release does not count it.
    """

    output: Any
    local: dict[str, int] | None
    external: dict[str, int] | None

    @property
    def scheduled(self) -> dict[str, int]:
        """Tokens scheduled, by request id."""
        return dict(self.output.num_scheduled_tokens)


def build_scheduler(
    *,
    block_size: int = 16,
    num_blocks: int = 1024,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 8192,
    enable_caching: bool = True,
    log_stats: bool = True,
    connector: bool = False,
    hybrid: bool = False,
    chunked_prefill: bool = True,
    max_model_len: int = 8192,
    scheduler_class: Any = None,
) -> Any:
    """Builds a scheduler of the installed release.

    Args:
        block_size: Tokens in a KV block.
        num_blocks: KV blocks in the pool; one of them is vLLM's null block.
        max_num_seqs: Requests that may run at once.
        max_num_batched_tokens: Token budget of a step.
        enable_caching: Whether there is a prefix cache.
        log_stats: Whether statistics are kept.
        connector: Whether there is a KV connector; it is `scheduler.connector`, with the answers in its `script`.
        hybrid: Whether the KV cache has a Mamba group beside the full-attention group.
        chunked_prefill: Whether a prompt may be computed in several steps.
        max_model_len: Tokens that a request may have, prompt and output.
        scheduler_class: Scheduler class; by default vLLM's `Scheduler`.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler_class = scheduler_class or Scheduler
    config = parts.vllm_config(block_size, max_num_seqs, max_num_batched_tokens, max_model_len, connector)
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.enable_prefix_caching = enable_caching
    # Set after the fact: the configuration's own checks want a model and the platform's consent for each of these.
    scheduling = config.scheduler_config
    scheduling.disable_hybrid_kv_cache_manager = not hybrid
    scheduling.enable_chunked_prefill = scheduling.chunked_prefill_enabled = chunked_prefill
    scheduling.async_scheduling = any(base.__name__ == "AsyncScheduler" for base in scheduler_class.__mro__)
    arguments = parts.known_arguments(
        Scheduler,
        vllm_config=config,
        scheduler_config=config.scheduler_config,
        model_config=config.model_config,
        cache_config=config.cache_config,
        lora_config=None,
        kv_cache_config=parts.kv_cache_config(block_size, num_blocks, hybrid),
        structured_output_manager=parts.structured_output(config),
        block_size=block_size,
        log_stats=log_stats,
    )
    return scheduler_class(**arguments)


def make_request(
    scheduler: Any,
    request_id: str,
    token_ids: Sequence[int],
    *,
    max_tokens: int = 16,
    prompt_logprobs: int | None = None,
) -> Any:
    """A request of the installed release, not yet added to the scheduler.

    `prompt_logprobs` makes it one that may not read the prefix cache, in every release.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(
        **parts.known_arguments(
            Request,
            request_id=request_id,
            prompt_token_ids=list(token_ids),
            multi_modal_inputs=None,
            multi_modal_kwargs=None,
            multi_modal_hashes=None,
            multi_modal_placeholders=None,
            sampling_params=SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, temperature=0.0, prompt_logprobs=prompt_logprobs
            ),
            pooling_params=None,
            eos_token_id=None,
            arrival_time=0.0,
            block_hasher=parts.block_hasher(scheduler.cache_config.block_size),
        )
    )


def step(scheduler: Any, *, loaded: Iterable[str] = ()) -> Step:
    """Schedules once and feeds back what a worker would: a token for each request whose prompt is computed.

    Args:
        scheduler: As built here.
        loaded: Ids of the requests whose asynchronous load has come to its end.
    """
    output = scheduler.schedule()
    return finish_step(scheduler, output, loaded=loaded)


def finish_step(scheduler: Any, output: Any, *, loaded: Iterable[str] = ()) -> Step:
    """The second half of `step`: what the worker answers to a `SchedulerOutput`."""
    results = scheduler.update_from_output(output, _worker_output(scheduler, output, frozenset(loaded)))
    results = list(results.values()) if isinstance(results, dict) else [results]
    reported = [result.scheduler_stats for result in results if result.scheduler_stats is not None]
    local = [counts(stats.prefix_cache_stats) for stats in reported]
    external = [counts(getattr(stats, "connector_prefix_cache_stats", None)) for stats in reported]
    return Step(output=output, local=local[0] if local else None, external=external[0] if external else None)


def take_stats(scheduler: Any) -> tuple[dict[str, int] | None, dict[str, int] | None]:
    """Takes the local and the connector's counters that no step has reported yet, as `schedule()` left them."""
    stats = scheduler.make_stats()
    if stats is None:
        return None, None
    return counts(stats.prefix_cache_stats), counts(getattr(stats, "connector_prefix_cache_stats", None))


def counts(stats: Any) -> dict[str, int] | None:
    """The counters of a `PrefixCacheStats`, those that the release has; None of None."""
    return None if stats is None else {name: getattr(stats, name) for name in COUNTERS if hasattr(stats, name)}


def abort(scheduler: Any, request_id: str) -> None:
    """Ends a request the way a client that hangs up does."""
    from vllm.v1.request import RequestStatus

    scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)


def connector_can_defer() -> bool:
    """Whether the installed release lets a connector answer None (0.10.2 and later), read from its signature."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    returns = str(inspect.signature(KVConnectorBase_V1.get_num_new_matched_tokens).return_annotation)
    return "None" in returns or "Optional" in returns


def async_scheduler_class() -> Any:
    """vLLM's `AsyncScheduler`, or None before 0.10."""
    try:
        return importlib.import_module("vllm.v1.core.sched.async_scheduler").AsyncScheduler
    except ModuleNotFoundError:
        return None


def computed_before(output: Any) -> dict[str, int]:
    """Tokens computed before the step, of each request in a `SchedulerOutput`."""
    before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    if isinstance(cached, list):
        before.update((one.req_id, one.num_computed_tokens) for one in cached)
    else:
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return before


def _worker_output(scheduler: Any, output: Any, loaded: frozenset[str]) -> Any:
    from vllm.v1 import outputs

    before = computed_before(output)
    ids = list(output.num_scheduled_tokens)
    done = [
        before[id_] + output.num_scheduled_tokens[id_] >= scheduler.requests[id_].num_tokens
        if id_ in scheduler.requests
        else False
        for id_ in ids
    ]
    fields: dict[str, Any] = {
        "req_ids": ids,
        "req_id_to_index": {id_: index for index, id_ in enumerate(ids)},
        "sampled_token_ids": [_tokens([7] if is_done else []) for is_done in done],
        "spec_token_ids": None,
        "logprobs": None,
        "prompt_logprobs_dict": {},
        "pooler_output": [],
        "finished_recving": set(loaded),
    }
    if hasattr(outputs, "KVConnectorOutput"):
        fields["kv_connector_output"] = outputs.KVConnectorOutput(finished_recving=set(loaded)) if loaded else None
    return outputs.ModelRunnerOutput(**parts.known_arguments(outputs.ModelRunnerOutput, **fields))


def _tokens(ids: list[int]) -> Any:
    """Sampled tokens of one request: a list, in 0.11.1 - 0.12.0 an array."""
    from vllm.v1.outputs import ModelRunnerOutput

    if "ndarray" not in str(ModelRunnerOutput.__annotations__["sampled_token_ids"]):
        return ids
    return importlib.import_module("numpy").array(ids, dtype="int64")
