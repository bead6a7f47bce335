"""Plugins that tests have vLLM load into its processes."""

from __future__ import annotations

import os
from typing import Any


def fork() -> None:
    """Has engine cores and workers forked, as on other platforms: the CPU backend insists on spawning them."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def lookup_of_its_own() -> None:
    """Puts another lookup in the place of vLLM's, without a way back to it."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    def get_computed_blocks(self: Any, request: Any) -> Any:
        return self.empty_kv_cache_blocks, 0, 0

    KVCacheManager.get_computed_blocks = get_computed_blocks


def ray_places_by_cpu() -> None:
    """Gives the CPU backend what it lacks for Ray: the name of the resource to place actors by."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "CPU"
