"""The process with an offline engine: `python -m kvmend_fixes.demos._offline SPEC RESULT`, both JSON files.

The first request is being answered before the others arrive. So the number of scheduling retries does not depend on
how fast they arrive, and there is an output in every step: `LLMEngine.step` of 0.26 throws away the statistics of a
step without one.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from kvmend_fixes.demos._scenarios import OUTPUT_TOKENS


def work(engine_arguments: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    """Runs the prompts through a new engine.

    Returns:
        `queries` and `hits` (tokens, from the Prometheus counters), `external_queries` and `external_hits` (the same
        of KV connectors), `cached` (tokens, one per request, None where the release does not say) and `start_seconds`.
    """
    begin = time.monotonic()
    from vllm import LLM, SamplingParams

    llm = LLM(**engine_arguments, disable_log_stats=False)
    start_seconds = time.monotonic() - begin
    engine = llm.llm_engine
    parameters = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False, temperature=0.0)
    cached: dict[str, int | None] = {}

    def step() -> bool:
        outputs = engine.step()
        cached.update({output.request_id: output.num_cached_tokens for output in outputs if output.finished})
        return bool(outputs)

    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, parameters)
        while number == 0 and not step():
            pass
    while engine.has_unfinished_requests():
        step()

    def counter(name: str) -> int:
        return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == name)

    return {
        "queries": counter("vllm:prefix_cache_queries"),
        "hits": counter("vllm:prefix_cache_hits"),
        "external_queries": counter("vllm:external_prefix_cache_queries"),
        "external_hits": counter("vllm:external_prefix_cache_hits"),
        "cached": [cached[str(number)] for number in range(len(prompts))],
        "start_seconds": start_seconds,
    }


if __name__ == "__main__":
    specification = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    answer = work(specification["engine"], specification["prompts"])
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")
