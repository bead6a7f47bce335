"""Sender of the double: transfers a request's blocks to the decode node, layer by layer, as chunks are computed."""

from __future__ import annotations

from typing import Any


class CacheMessagerV1:
    """Reads from its queue how far each slot is computed and sends what the decode node lacks up to there."""

    block_size: int
    num_layers: int
    idx_cache_task_dict: dict[int, dict[str, Any]]
    cache_prefilled_engine_ids_queue: Any
    engine_worker_queue: Any
    messager: dict[str, Any]

    def prefill_layerwise_send_cache_thread(self) -> None:
        while True:
            signals = self.cache_prefilled_engine_ids_queue.get()
            for layer in range(self.num_layers):
                for slot, computed in signals:
                    task = self.idx_cache_task_dict[slot]
                    whole = computed == task["need_prefill_tokens"]
                    end = len(task["src_block_ids"]) if whole else computed // self.block_size
                    start = task["sended_block_num"]
                    if start < end:
                        source, target = task["src_block_ids"][start:end], task["dest_block_ids"][start:end]
                        self.messager[task["transfer_protocol"]].write_cache("", 0, source, target, layer)
                    if layer == self.num_layers - 1:
                        task["sended_block_num"] = max(end, start)
                        if whole:
                            self.engine_worker_queue.put_finished_req([[task["request_id"], "finished"]])
