"""A KV connector that does not know yet. Only the engine imports this module, by its path in `kv_transfer_config`.

Connectors to remote KV stores answer None while a lookup there is in flight; the scheduler then puts the request
back and asks again in a later step. This one does so a fixed number of times per request and never has any KV.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class DeferringConnector(KVConnectorBase_V1):  # type: ignore[misc, unused-ignore]
    """Defers each request `deferrals` times (of `kv_connector_extra_config`), then reports 0 matched tokens."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        # Releases before 0.11 know no third argument and pass none.
        super().__init__(vllm_config, role, *(() if kv_cache_config is None else (kv_cache_config,)))
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._deferrals = int(extra["deferrals"])
        self._deferred: Counter[str] = Counter()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """None for "ask again later", then 0 tokens, not loaded asynchronously."""
        if self._deferred[request.request_id] < self._deferrals:
            self._deferred[request.request_id] += 1
            return None, False
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing to remember: no block is ever loaded."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Empty metadata: the worker has nothing to do."""
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Frees the blocks at once; forgets the request."""
        self._deferred.pop(request.request_id, None)
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""
