"""The worker's side of the double: runner, proposer, and what both sides share."""

from __future__ import annotations

_OPEN = """\
        signal = IPCSignal(
            name="cache_ready_signal",
            array=numpy.zeros(shape=[self.parallel_config.tensor_parallel_size], dtype=numpy.int32),
            dtype=numpy.int32,
            suffix=self.parallel_config.local_engine_worker_queue_port,
            create=False,
        ).value
        rank = self.local_rank % self.parallel_config.tensor_parallel_size
        create_cache_tensor = profile or ({condition})
        while not create_cache_tensor and not signal[rank]:
            time.sleep(1)
        caches = []
        for layer in range(first, first + self.model_config.num_hidden_layers):
            for kind in ("key", "value"):
                name = f"{kind}_caches_{layer}_rank{rank}.device{self.device_id}"
                if create_cache_tensor:
                    tensor = paddle.full(shape=shape, fill_value=0, dtype=self.model_config.dtype)
                    set_data_ipc(tensor, name)
                else:
                    tensor = share_external_data(None, name, shape, False)
                caches.append(tensor)
"""

_IMPORTS = """\
import time

import numpy
import paddle
from fastdeploy.inter_communicator import IPCSignal
from fastdeploy.model_executor.ops.xpu import set_data_ipc, share_external_data

"""

RUNNER = (
    _IMPORTS
    + '''
class XPUModelRunner:
    """Creates the KV tensors, or attaches to those of another process."""

    def initialize_kv_cache(self, profile=False):
        first, shape = 0, self.attn_backends[0].get_kv_cache_shape(max_num_blocks=self.num_gpu_blocks)[0]
'''
    + _OPEN
    + """\
        self.share_inputs["caches"] = caches
        if create_cache_tensor and not profile:
            signal[rank] = 1

    def profile_run(self):
        blocks = self.cache_config.total_block_num
        self.num_gpu_blocks = blocks
        self.initialize_kv_cache(True)

    def update_share_input_block_num(self, num_gpu_blocks):
        self.num_gpu_blocks = int(num_gpu_blocks)
        if getattr(self, "proposer", None) is not None:
            self.proposer.initialize_kv_cache(main_model_num_blocks=num_gpu_blocks)
        self.initialize_kv_cache()

    def clear_cache(self):
        self.share_inputs.clear()
"""
)

_PROPOSES = """
    def _init_speculative_proposer(self):
        self.proposer = None
        if "mtp" in (self.speculative_method or ""):
            from fastdeploy.spec_decode.mtp import MTPProposer

            self.proposer = MTPProposer(self.fd_config)
"""

PROPOSER = (
    _IMPORTS
    + '''
class MTPProposer:
    """A draft model with KV tensors of its own, behind those of the main model."""

    def __init__(self, fd_config):
        self.fd_config = fd_config

    def initialize_kv_cache(self, main_model_num_blocks, profile=False):
        self.num_gpu_blocks = main_model_num_blocks
        first, shape = self.num_main_model_layers, self.attn_backends[0].get_kv_cache_shape(
            max_num_blocks=self.num_gpu_blocks
        )[0]
'''
    + _OPEN
    + """\
        self.model_inputs["caches"] = caches
"""
)

PADDLE = """\
from types import SimpleNamespace

device = SimpleNamespace(xpu=SimpleNamespace(), cuda=SimpleNamespace())
"""

NUMPY = """\
int32 = "int32"


class Array(list):
    def copy(self):
        return Array(self)

    def __setitem__(self, place, value):
        if isinstance(place, slice):
            value = [value] * len(self[place])
        super().__setitem__(place, value)


def zeros(shape, dtype):
    return Array([0] * shape[0])
"""

SIGNALS = '''\
class IPCSignal:
    """Shared memory, which the tests put something in the place of."""

    def __init__(self, name, array, dtype, suffix, create):
        raise FileNotFoundError(f"{name}.{suffix}")
'''

CONFIG = """\
class SpeculativeConfig:
    def __init__(self, args):
        self.method = args.get("method")
        self.num_extra_cache_layer = 1 if self.method == "mtp" else 0
"""

OPERATORS = """\
def set_data_ipc(tensor, name):
    raise RuntimeError("no device")


def share_external_data(tensor, name, shape, use_ipc):
    raise RuntimeError("no device")
"""

ATTENTION = """\
class XPUAttentionBackend:
    def get_kv_cache_shape(self, max_num_blocks):
        shape = [max_num_blocks, self.kv_num_heads, self.block_size, self.head_dim]
        return shape, shape
"""


def files(condition: str, proposer: str | None) -> dict[str, str]:
    """The files of this side, by their path in the tree; no proposer if it has no condition."""
    kept = {
        "paddle.py": PADDLE,
        "numpy.py": NUMPY,
        "fastdeploy/envs.py": "ENABLE_V1_KVCACHE_MANAGER = 0\n",
        "fastdeploy/config.py": CONFIG,
        "fastdeploy/inter_communicator.py": SIGNALS,
        "fastdeploy/model_executor/ops/xpu.py": OPERATORS,
        "fastdeploy/model_executor/layers/attention/__init__.py": "def get_attention_backend():\n    return None\n",
        "fastdeploy/model_executor/layers/backends/xpu/attention.py": ATTENTION,
        "fastdeploy/spec_decode/mtp.py": _IMPORTS + "\nclass MTPProposer:\n    pass\n",
        "fastdeploy/worker/xpu_model_runner.py": RUNNER.replace("{condition}", condition),
    }
    if proposer is not None:
        kept["fastdeploy/worker/xpu_model_runner.py"] += _PROPOSES
        kept["fastdeploy/spec_decode/mtp.py"] = PROPOSER.replace("{condition}", proposer)
    return kept
