"""The cache messager sends every block, wherever a request starts."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pnode import PNode

PROMPT = list(range(100, 132))
LAYERS = 3
Make = Callable[..., PNode]


def _messager_module() -> Any:
    """The tree's messager; the compiled operators that it imports and does not need here stay out."""
    with contextlib.suppress(ImportError):
        operators = importlib.import_module("fastdeploy.model_executor.ops.gpu")
        if not hasattr(operators, "__getattr__"):
            vars(operators)["__getattr__"] = _operator
    module: Any = importlib.import_module("fastdeploy.cache_manager.cache_messager")
    module.logger = logging.getLogger("messager")  # made in its `main()`
    return module


def _operator(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_: None


class Sender:
    """The tree's own sending loop, with a transfer that notes what it was given."""

    def __init__(self, block_size: int, task: dict[str, Any]) -> None:
        self.sent: dict[int, list[int]] = {layer: [] for layer in range(LAYERS)}
        self.finished: list[str] = []
        module = _messager_module()
        messager = module.CacheMessagerV1.__new__(module.CacheMessagerV1)
        barrier = SimpleNamespace(wait=lambda: None)
        messager.block_size, messager.num_layers, messager.rank, messager.nranks = block_size, LAYERS, 0, 1
        messager.block_bytes, messager.cache_dtype, messager.rank_id = 1, "bfloat16", 0
        messager.cache_info = {task["request_id"]: task}
        messager.idx_cache_task_dict = {task["current_id"]: task}
        messager.engine_cache_tasks = [{} for _ in range(8)]
        messager.engine_cache_task_thread_lock = threading.Lock()
        messager.pending_layer0_signals, messager.pending_layer0_signal_lock = {}, threading.Lock()
        messager.cache_prefilled_engine_ids_queue = queue.Queue()
        messager.engine_worker_queue = SimpleNamespace(
            begin_send_cache_barrier=barrier,
            finish_send_cache_barrier=barrier,
            finish_request_barrier=barrier,
            put_finished_req=lambda requests: self.finished.extend(request[0] for request in requests),
        )
        messager.messager = {"ipc": SimpleNamespace(write_cache=self._write, write_block_by_sync=lambda _: None)}
        self.messager, self.slot = messager, task["current_id"]
        # 2.3 passes slots alone and reads how far they are from a table, later releases pass both.
        source = inspect.getsource(module.CacheMessagerV1.prefill_layerwise_send_cache_thread)
        self.slots_alone = 'self.engine_cache_tasks[engine_index]["prefilled_token_num"]' in source
        threading.Thread(target=messager.prefill_layerwise_send_cache_thread, daemon=True).start()

    def computed(self, tokens: int) -> None:
        """The worker has computed the prompt up to here, in all layers."""
        self.messager.engine_cache_tasks[self.slot].update(prefilled_layer_idx=LAYERS - 1, prefilled_token_num=tokens)
        signal = self.slot if self.slots_alone else (self.slot, tokens)
        before = threading.Event()
        self.messager.cache_prefilled_engine_ids_queue.put([signal])
        for _ in range(500):
            if self.messager.cache_prefilled_engine_ids_queue.empty() and self._idle(tokens):
                return
            before.wait(0.01)
        raise AssertionError(f"nothing was sent for {tokens} tokens")

    def _idle(self, tokens: int) -> bool:
        task = self.messager.idx_cache_task_dict.get(self.slot)
        done = tokens // self.messager.block_size
        return bool(self.finished) or (task is not None and task["sended_block_num"] >= done)

    def _write(self, _ip: Any, _idx: Any, source: Any, target: Any, layer: int) -> int:
        assert len(source) == len(target)
        self.sent[layer].extend(int(block) for block in source)
        return 0


@pytest.mark.parametrize("decode_has", [0, 2], ids=["all", "what-is-missing"])
def test_every_block_is_sent_when_a_hit_is_taken_back_after_the_messager_was_told(
    applied: Any, node: Make, decode_has: int
) -> None:
    """Catches a start lowered too late: the messager got the block table when the request still had a full hit."""
    made = node(budget=10)
    made.preallocate("x", PROMPT)
    made.refuse("x")
    made.preallocate("y", PROMPT)
    request = made.entries["y"].request
    assert request.num_computed_tokens == 28
    blocks = list(request.block_tables)
    sender = Sender(4, _task(request, blocks, decode_has))
    made.accept("y")
    while made.entries["y"].state != "prefilled":
        (chunk,) = made.step()
        sender.computed(chunk.end)
    assert [chunk.start for chunk in made.chunks] == [0, 10, 20, 30]
    assert request.block_tables == blocks
    assert sender.sent == dict.fromkeys(range(LAYERS), blocks[decode_has:])
    assert sender.finished == ["y"]


def test_every_block_is_sent_when_a_publisher_starts_behind_what_others_computed(applied: Any, node: Make) -> None:
    """Catches blocks left out because another request computed them after the messager was told."""
    made = node(budget=40)
    made.preallocate("r1", PROMPT)
    request = made.entries["r1"].request
    sender = Sender(4, _task(request, list(request.block_tables), 0))
    made.preallocate("r2", PROMPT)
    made.accept("r2")
    made.step()
    made.accept("r1")
    (chunk,) = made.step()
    assert chunk.start == 28
    sender.computed(chunk.end)
    assert sender.sent == {layer: list(request.block_tables) for layer in range(LAYERS)}


def _task(request: Any, blocks: list[int], decode_has: int) -> dict[str, Any]:
    """What prefill and decode node tell the messager of a request, as it keeps it."""
    return {
        "request_id": request.request_id,
        "src_block_ids": list(blocks),
        "dest_block_ids": [-1] * decode_has + [1000 + block for block in blocks[decode_has:]],
        "current_id": request.idx,
        "need_prefill_tokens": request.need_prefill_tokens,
        "decode_cached_tokens": decode_has * 4,
        "sended_layer_id": -1,
        "sended_block_num": decode_has,
        "status": "init",
        "transfer_protocol": "ipc",
        "device_ids": ["0"],
        "rdma_ports": ["0"],
        "ip": "0.0.0.0",
    }
