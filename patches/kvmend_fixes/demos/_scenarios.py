"""What the demo asks of the engine, and what it reads off it. Pure data: no process is started here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BLOCK = 16
SHARED_TOKENS = 128
TAIL_TOKENS = 40
PROMPT_TOKENS = SHARED_TOKENS + TAIL_TOKENS
OUTPUT_TOKENS = 32
DEFERRALS = 3

#: A random 2-layer model: the engine needs this one file, no weights and no tokenizer. The head size is the
#: smallest that the CPU attention of vLLM 0.26 takes.
MODEL: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_ENGINE: Mapping[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "seed": 0,
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "block_size": BLOCK,
    "max_num_seqs": 64,
    "max_model_len": 512,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scenario:
    """A load and the engine it meets.

    Attributes:
        name: As shown and as in the JSON.
        about: One line on what makes vLLM count wrongly here.
        engine: Engine arguments, in the spelling of `vllm.LLM`.
        cold: Whether the first request, which is ahead of the others, leaves their shared prefix uncached.
        different: How many different prompts there are, which then come again in the same order; None if all are.
    """

    name: str
    about: str
    engine: Mapping[str, Any]
    cold: bool = False
    different: int | None = None


KV_PRESSURE = Scenario(
    name="KV pressure",
    about="the KV blocks run out, and a request is looked up again at every step until some are free",
    engine={**_ENGINE, "num_gpu_blocks_override": 40},
)

DEFERRING_CONNECTOR = Scenario(
    name="deferring connector",
    cold=True,
    about=f"a KV connector answers None {DEFERRALS} times for each request, and each time it is looked up again",
    # Blocks for all 64 running requests, so that deferrals are the only reason for a second lookup.
    engine={
        **_ENGINE,
        "num_gpu_blocks_override": 512,
        "kv_transfer_config": {
            "kv_connector": "DeferringConnector",
            "kv_connector_module_path": "kvmend_fixes.demos._deferring_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"deferrals": DEFERRALS},
        },
    },
)

SCENARIOS = (KV_PRESSURE, DEFERRING_CONNECTOR)


def prompts(scenario: Scenario, requests: int) -> list[list[int]]:
    """Token ids of each request's prompt: 128 that requests share, then 40 that begin differently in each."""
    shared = list(range(3, 3 + SHARED_TOKENS))
    first = 3 + SHARED_TOKENS
    result = [
        [*shared, first + number % 300, first + number // 300, *(first + place for place in range(TAIL_TOKENS - 2))]
        for number in (request % (scenario.different or requests) for request in range(requests))
    ]
    if scenario.cold:
        result[0].reverse()
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one engine counted, and what was true.

    Attributes:
        sent: Prompt tokens sent.
        queries: Counter `vllm:prefix_cache_queries`, tokens. Preempted requests that are resumed are counted by vLLM
            under other names, which this counter leaves out: one lookup per request is the right value.
        hits: Counter `vllm:prefix_cache_hits`, tokens.
        true_hits: Cached prompt tokens as each request's own output reports them, summed. vLLM sets that figure for
            the lookup that led to admission; None if the release does not report it.
        start_seconds: From starting the process to an engine that takes requests.
        seconds: From starting the process to its end.
        outcome: What kvmend reported in the engine's process, as in "applied: …"; "" if it reported nothing.
    """

    sent: int
    queries: int
    hits: int
    true_hits: int | None
    start_seconds: float = 0.0
    seconds: float = 0.0
    outcome: str = ""

    @property
    def reported_hit_rate(self) -> float:
        """Hits per query as an operator reads them off the counters; 0 without queries."""
        return self.hits / self.queries if self.queries else 0.0

    @property
    def true_hit_rate(self) -> float | None:
        """Cached prompt tokens per prompt token sent, or None if not known."""
        return None if self.true_hits is None else self.true_hits / self.sent

    @property
    def exact(self) -> bool:
        """Whether every prompt token was counted once and every hit is a true one."""
        return self.queries == self.sent and self.true_hits in (None, self.hits)

    @property
    def verdict(self) -> str:
        """Either "exact" or by how much the queries, or else the hits, are wrong."""
        if self.exact:
            return "exact"
        if self.queries != self.sent:
            return f"wrong by {(self.queries / self.sent - 1) * 100:+.1f} %"
        return f"hits wrong by {self.hits - (self.true_hits or 0):+,d}"

    def as_dict(self) -> dict[str, Any]:
        """The reading in the JSON of `kvmend demo`; rates are fractions, times seconds."""
        true = self.true_hit_rate
        return {
            "queries": self.queries,
            "hits": self.hits,
            "true_hits": self.true_hits,
            "reported_hit_rate": round(self.reported_hit_rate, 6),
            "true_hit_rate": None if true is None else round(true, 6),
            "verdict": self.verdict,
            "kvmend": self.outcome,
            "start_seconds": round(self.start_seconds, 1),
            "seconds": round(self.seconds, 1),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One scenario, once without and once with kvmend.

    Attributes:
        scenario: The scenario.
        transport: "offline" or "http".
        run: 1-based number of the repetition.
        requests: Requests sent.
        without: Reading with KVMEND=0.
        mended: Reading with KVMEND=1.
    """

    scenario: Scenario
    transport: str
    run: int
    requests: int
    without: Reading = field(repr=False)
    mended: Reading = field(repr=False)

    @property
    def verdict(self) -> str:
        """One of "mended", "right without kvmend" and "not mended"."""
        if not self.mended.exact:
            return "not mended"
        return "right without kvmend" if self.without.exact else "mended"

    def as_dict(self) -> dict[str, Any]:
        """The comparison in the JSON of `kvmend demo`."""
        return {
            "name": self.scenario.name,
            "transport": self.transport,
            "run": self.run,
            "requests": self.requests,
            "prompt_tokens_sent": self.mended.sent,
            "without": self.without.as_dict(),
            "with": self.mended.as_dict(),
            "verdict": self.verdict,
        }
