"""A KV connector that answers from a script. Only vLLM imports this module, by its path in `kv_transfer_config`."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base as _base

# Hybrid models want a connector that says it can handle several block tables; older releases know no such class.
_Hybrid: Any = getattr(_base, "SupportsHMA", object)


class ScriptedConnector(_base.KVConnectorBase_V1, _Hybrid):  # type: ignore[misc, unused-ignore]
    """Answers from `script`: request id to the answers still to give; the last one is given for ever.

    It never claims more than the whole blocks that a request misses before its last token, as real ones do.

    Attributes:
        script: Answers by request id, see `kvmend_fixes.proofs._vllm_rig.Answer`; unlisted requests have 0 tokens.
        told: The local hit, in tokens, that the scheduler reported with its last question, by request id.
        granted: The tokens of the last answer that was not None, by request id.
        asked: Number of questions, by request id.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        # Releases before 0.11 know no third argument and pass none.
        super().__init__(vllm_config, role, *(() if kv_cache_config is None else (kv_cache_config,)))
        self.script: dict[str, list[tuple[int, bool] | None]] = {}
        self._cache_config = vllm_config.cache_config
        self.told: dict[str, int] = {}
        self.granted: dict[str, int] = {}
        self.asked: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The next answer for the request; `(None, False)` is vLLM's form of "ask again later"."""
        self.told[request.request_id] = num_computed_tokens
        self.asked[request.request_id] = self.asked.get(request.request_id, 0) + 1
        answers = self.script.get(request.request_id) or [(0, False)]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is None:
            return None, False
        block_size = self._cache_config.block_size
        missing = (request.num_tokens - 1 - num_computed_tokens) // block_size * block_size
        tokens = self.granted[request.request_id] = min(answer[0], missing)
        return tokens, answer[1] and tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing to remember: no block is ever loaded."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Empty metadata: there is no worker."""
        return _base.KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Frees the blocks at once."""
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Frees the blocks at once."""
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """There is no worker."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """There is no worker."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """There is no worker."""

    def wait_for_save(self) -> None:
        """There is no worker."""
