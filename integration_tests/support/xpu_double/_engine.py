"""The engine's side of the double: engine, cache manager, transfer manager and cache messager."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launch rule.

    Attributes:
        when: Test for launching the transfer manager.
        told: Test for telling it to create; empty if it cannot be told.
    """

    when: str
    told: str


ENGINE = '''\
class LLMEngine:
    """Owns the cache service of the first data parallel group."""

    def start(self):
        profiling = bool(self.do_profile)
        if self.cfg.scheduler_config.splitwise_role != "mixed" and not self.do_profile:
            self._serve()
            self.cache_processes = self.engine.start_cache_service(self._devices(), self.ipc_signal_suffix)
        if not self.wait_for_workers():
            return False
        if self.do_profile:
            self._stop_profile()
        elif self.cfg.cache_config.enable_prefix_caching and self.cfg.scheduler_config.splitwise_role == "mixed":
            self.cache_processes = self.engine.start_cache_service(self._devices(), self.ipc_signal_suffix)
        return profiling or True

    def _stop_profile(self):
        self.do_profile = False
        blocks = int(self.get_profile_block_num_signal.value[0])
        self.cfg.cache_config.reset(blocks)
        if self.cfg.cache_config.enable_prefix_caching or not self.cfg.scheduler_config.splitwise_role == "mixed":
            self.cache_processes = self.engine.start_cache_service(self._devices(), self.ipc_signal_suffix)

    def _devices(self):
        return [int(device) for device in self.cfg.parallel_config.device_ids.split(",")]
'''

EXPERTS = '''\
class ExpertService:
    """Owns the cache service of any other data parallel group."""

    def start(self, suffix, group):
        service_wanted = self.cfg
        if service_wanted.cache_config.enable_prefix_caching or self.cfg.scheduler_config.splitwise_role != "mixed":
            self.cache_processes = self.engine.start_cache_service(self.cfg.local_device_ids, suffix)
'''

SERVICE = '''\
class EngineService:
    """Hands the launch on to the cache manager."""

    def start_cache_service(self, devices, suffix):
        manager = self.resource_manager.cache_manager
        config = self.cfg
        return manager.launch_cache_manager(
            config.cache_config,
            config.parallel_config.tensor_parallel_size,
            devices,
            suffix,
            create_cache_tensor=False,
        )
'''

PREFIX = '''\
import subprocess
import time

import numpy
from fastdeploy.inter_communicator import IPCSignal
from fastdeploy.model_executor.layers import attention


class PrefixCacheManager:
    """Launches the processes that hold or move the KV tensors."""

    def __init__(self, config, tensor_parallel_size, splitwise_role="mixed", local_data_parallel_id=0):
        self.config, self.splitwise_role = config, splitwise_role
        self.enable_splitwise = 0 if splitwise_role == "mixed" else 1

    def _words(self, script, rank, device, ranks, suffix, cache_config):
        shape = attention.get_attention_backend()().get_kv_cache_shape(max_num_blocks=cache_config.total_block_num)[0]
        extra = self.config.speculative_config.num_extra_cache_layer
        return ["python", script, "--rank", rank, "--device_id", device, "--mp_num", ranks, "--suffix", suffix,
                "--num_layers", self.config.model_config.num_hidden_layers, "--extra_layers", extra,
                "--key_cache_shape", ",".join(map(str, shape))]

    def _ready(self, ranks, suffix):
        signal = IPCSignal(
            name="cache_ready_signal", array=numpy.zeros(shape=[ranks], dtype=numpy.int32), dtype=numpy.int32,
            suffix=suffix, create=False,
        )
        while sum(signal.value) != ranks:
            time.sleep(1)

    def launch_cache_messager(self, cache_config, ranks, devices, suffix):
        for rank in range(ranks):
            words = self._words("cache_messager.py", rank, devices[rank], ranks, suffix, cache_config)
            subprocess.Popen(" ".join(map(str, words)), shell=True)
        self._ready(ranks, suffix)

    def launch_cache_manager(self, cache_config, ranks, devices, suffix, create_cache_tensor):
        if self.enable_splitwise:
            self.launch_cache_messager(cache_config, ranks, devices, suffix)
        script = "cache_transfer_manager.py"
        if {when}:
            for rank in range(ranks):
                words = self._words(script, rank, devices[rank], ranks, suffix, cache_config)
{told}
                subprocess.Popen(" ".join(map(str, words)), shell=True)
        self._ready(ranks, suffix)
'''

_TOLD = """\
                if {told}:
                    words.append("--create_cache_tensor")"""

_PARSER = """\
import argparse
import time

import numpy
import paddle
from fastdeploy.inter_communicator import IPCSignal
from fastdeploy.model_executor.ops.xpu import set_data_ipc, share_external_data


def parse_args():
    parser = argparse.ArgumentParser()
    for name in ("rank", "device_id", "mp_num", "suffix", "num_layers", "extra_layers"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--key_cache_shape")
    parser.add_argument("--create_cache_tensor", action="store_true", help="whether to create or to attach")
    return parser.parse_args()


def ready_signal(args):
    return IPCSignal(
        name="cache_ready_signal", array=numpy.zeros(shape=[args.mp_num], dtype=numpy.int32), dtype=numpy.int32,
        suffix=args.suffix, create=False,
    ).value


def names(args):
    for layer in range(args.num_layers + args.extra_layers):
        for kind in ("key", "value"):
            yield f"{kind}_caches_{layer}_rank{args.rank}.device{args.device_id}"


def shape(args):
    return [int(each) for each in args.key_cache_shape.split(",")]
"""

TRANSFER = (
    _PARSER
    + '''

class CacheTransferManager:
    """Moves KV blocks to and from other memory; some generations have it create the KV tensors."""

    def __init__(self, args):
        self.args, self.tensors = args, []
        self._init_gpu_cache(args)

    def _init_gpu_cache(self, args):
        signal = ready_signal(args)
        for name in names(args):
            if args.create_cache_tensor is True:
                tensor = paddle.full(shape=shape(args), fill_value=0, dtype="bfloat16")
                set_data_ipc(tensor, name)
            else:
                while not signal[args.rank]:
                    time.sleep(1)
                tensor = share_external_data(None, name, shape(args), True)
            self.tensors.append(tensor)
        if args.create_cache_tensor is True:
            signal[args.rank] = 1
'''
)

MESSAGER = (
    _PARSER
    + """

def main():
    for name in names(args):
        tensor = paddle.full(shape=shape(args), fill_value=0, dtype="bfloat16")
        set_data_ipc(tensor, name)
    ready_signal(args)[args.rank] = 1
"""
)


def files(launch: Launch) -> dict[str, str]:
    """The files of this side, by their path in the tree."""
    told = _TOLD.format(told=launch.told) if launch.told else ""
    prefix = PREFIX.replace("{when}", launch.when).replace("{told}", told)
    return {
        "fastdeploy/engine/engine.py": ENGINE,
        "fastdeploy/engine/expert_service.py": EXPERTS,
        "fastdeploy/engine/common_engine.py": SERVICE,
        "fastdeploy/cache_manager/prefix_cache_manager.py": prefix,
        "fastdeploy/cache_manager/cache_transfer_manager.py": TRANSFER,
        "fastdeploy/cache_manager/cache_messager.py": MESSAGER,
    }
