"""Requests of the double."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class RequestStatus(Enum):
    """Where a request stands."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


@dataclass
class RequestMetrics:
    """What is reported of one request."""

    gpu_cache_token_num: int = 0
    cpu_cache_token_num: int = 0
    storage_cache_token_num: int = 0
    preempted_count: int = 0


class Request:
    """A prompt and what has become of it."""

    def __init__(self, request_id: str, prompt_token_ids: list[int]) -> None:
        self.request_id = request_id
        self.prompt_token_ids: list[int] = prompt_token_ids
        self.output_token_ids: list[int] = []
        self.multimodal_inputs: dict[str, Any] | None = None
        self.metrics = RequestMetrics()
        self.status = RequestStatus.WAITING
        self.idx = -1
        self.block_tables: list[int] = []
        self.cache_info: list[int] = []
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_cached_blocks = 0
        self.need_prefill_tokens = len(prompt_token_ids)
        self.prefill_start_index = 0
        self.prefill_end_index = 0
        self.has_been_preempted_before = False

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Request:
        return cls(values["request_id"], values["prompt_token_ids"])

    @property
    def num_total_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)
