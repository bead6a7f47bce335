"""KV offloading without an accelerator: vLLM's connector and its scheduler side, and a worker side that copies rows.

vLLM's own worker side takes device memory only, and refuses a CPU. This one keeps the promises that the scheduler side
relies on: a transfer is done when a later step says so, not at once.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostOffloadingSpec(CPUOffloadingSpec):
    """`spec_name` in `kv_connector_extra_config`, with `spec_module_path` naming this module."""

    def get_worker(self, kv_caches: Any) -> Any:
        """The worker side, made at the first call."""
        assert self.blocks_per_chunk == 1
        if self._worker is None:
            self._worker = HostWorker(kv_caches, self.num_blocks)
        return self._worker


class HostWorker(OffloadingWorker):
    """Copies between the KV cache and memory beside it; what was submitted in a step is finished in the next."""

    def __init__(self, kv_caches: Any, num_blocks: int) -> None:
        self._cached = [each.tensor for each in kv_caches.tensors]
        self._kept = [torch.zeros((num_blocks, each.shape[1]), dtype=each.dtype) for each in self._cached]
        self._submitted: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """From the KV cache."""
        return self._copy(job_id, self._cached, src_spec, self._kept, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Into the KV cache."""
        return self._copy(job_id, self._kept, src_spec, self._cached, dst_spec)

    def _copy(self, job_id: int, sources: Any, source: Any, targets: Any, target: Any) -> bool:
        size = 0
        for from_, to in zip(sources, targets, strict=True):
            rows = from_[torch.as_tensor(source.block_ids)]
            to[torch.as_tensor(target.block_ids)] = rows
            size += rows.nbytes
        self._submitted.append(TransferResult(job_id=job_id, success=True, transfer_size=size, transfer_time=0.001))
        return True

    def get_finished(self) -> list[TransferResult]:
        """The transfers that were submitted."""
        finished, self._submitted = self._submitted, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Copies are done when they are submitted."""
