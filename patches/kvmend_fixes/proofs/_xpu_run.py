"""One start of a server's KV cache: the engine, the processes it launches, and the workers."""

from __future__ import annotations

import copy
import importlib
import shlex
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from kvmend_fixes.proofs._xpu_standins import LAYERS, StandIns, Waits, constant

if TYPE_CHECKING:
    from kvmend_fixes.proofs._xpu_rig import Rig, Setup, Started

_PORT = 9923


class Run(StandIns):
    """One start."""

    def __init__(self, rig: Rig, setup: Setup) -> None:
        super().__init__(rig, setup)
        self.runners: dict[str, Any] = {}
        self.fd_config = self._config()

    # -- the server --------------------------------------------------------------------------------------------------

    def _config(self) -> Any:
        setup = self.setup
        port = _PORT + setup.group
        model = SimpleNamespace(
            dtype="bfloat16", num_hidden_layers=LAYERS, num_attention_heads=16, num_key_value_heads=8, head_dim=128
        )
        model.max_model_len, model.model = 4096, "/model"
        drafts = {"method": "mtp", "model_type": "main"} if setup.mtp else {}
        cache = SimpleNamespace(
            num_cpu_blocks=setup.cpu_blocks,
            kvcache_storage_backend=setup.storage,
            enable_prefix_caching=setup.prefix_caching,
            enable_hierarchical_cache=setup.cpu_blocks > 0,
            total_block_num=setup.blocks,
            prefill_kvcache_block_num=setup.blocks,
            block_size=64,
            cache_dtype="bfloat16",
            cache_queue_port=8000,
            local_cache_queue_port=8000,
            rdma_comm_ports=None,
            local_rdma_comm_ports=None,
            cache_transfer_protocol="ipc",
            bytes_per_layer_per_block=1,
            bytes_per_token_per_layer=1,
            write_policy="write_through",
            kv_cache_ratio=0.75,
            model_cfg=model,
            reset=lambda blocks: None,
        )
        parallel = SimpleNamespace(
            tensor_parallel_size=setup.ranks,
            engine_worker_queue_port=port,
            local_engine_worker_queue_port=port,
            local_data_parallel_id=setup.group,
            device_ids=",".join(str(setup.group * setup.ranks + rank) for rank in range(setup.ranks)),
        )
        return SimpleNamespace(
            cache_config=cache,
            scheduler_config=SimpleNamespace(splitwise_role=setup.role, max_num_seqs=8, max_num_batched_tokens=64),
            parallel_config=parallel,
            model_config=model,
            quant_config=None,
            speculative_config=self.rig.config.SpeculativeConfig(drafts),
            master_ip="127.0.0.1",
            routing_replay_config=SimpleNamespace(enable_routing_replay=False),
        )

    def backend(self, *_args: Any, **_kwargs: Any) -> Any:
        """The XPU attention backend with what its `get_kv_cache_shape` needs, and no device."""
        layers = "fastdeploy.model_executor.layers"
        try:
            module = importlib.import_module(f"{layers}.backends.xpu.attention")
        except ImportError:
            module = importlib.import_module(f"{layers}.attention.xpu_attn_backend")
        backend = object.__new__(module.XPUAttentionBackend)
        model = self.fd_config.model_config
        backend.block_size, backend.head_dim = self.fd_config.cache_config.block_size, model.head_dim
        backend.kv_num_heads = max(1, model.num_key_value_heads // self.setup.ranks)
        return backend

    def engine(self) -> None:
        """The engine's side of a start: profiling is over, now the cache service, if there is to be one."""
        config = copy.copy(self.fd_config)
        config.parallel_config = copy.copy(config.parallel_config)
        # The engine knows the ports of all its data parallel groups, a worker that of its own.
        config.parallel_config.engine_worker_queue_port = [_PORT + group for group in range(self.setup.group + 1)]
        manager = self.rig.prefix.PrefixCacheManager(
            config, self.setup.ranks, self.setup.role, local_data_parallel_id=self.setup.group
        )
        service = object.__new__(self.rig.service.EngineService)
        service.cfg = config
        service.resource_manager = SimpleNamespace(cache_manager=manager, reset_cache_config=constant(None))
        engine = object.__new__(self.rig.engine.LLMEngine)
        engine.cfg, engine.engine, engine.worker_proc = config, service, None
        engine.ipc_signal_suffix = config.parallel_config.local_engine_worker_queue_port
        engine.get_profile_block_num_signal = SimpleNamespace(value=[self.setup.blocks])
        engine._stop_profile()

    def worker(self, rank: int) -> None:
        """A worker's side of a start: the number of blocks is known, the KV cache is set up."""
        name = f"runner {rank}"
        runner = self.runners.get(name) or self._runner(rank)
        self.runners[name] = runner
        runner.update_share_input_block_num(self.setup.blocks)

    def _runner(self, rank: int) -> Any:
        kind = self.rig.worker.XPUModelRunner
        runner = object.__new__(kind)
        self._common(runner, rank)
        runner.attn_backends, runner.share_inputs, runner.forward_meta = [self.backend()], {}, None
        runner.speculative_method = runner.spec_method = self._method(kind)
        runner.get_model = constant(None)
        if self.rig.has_mtp:
            with mock.patch.object(self.rig.mtp.MTPProposer, "__init__", constant(None)):
                runner._init_speculative_proposer()
            if runner.proposer is not None:
                self._common(runner.proposer, rank)
                runner.proposer.attn_backends, runner.proposer.model_inputs = [self.backend()], {}
                runner.proposer.cache_kvs_map, runner.proposer.num_main_model_layers = {}, LAYERS
                runner.proposer.model_config = SimpleNamespace(dtype="bfloat16", num_hidden_layers=1)
        return runner

    def _method(self, kind: Any) -> Any:
        if not self.setup.mtp:
            return None
        named = sys.modules[kind.__module__].__dict__.get("SpecMethod")
        return named("mtp") if named is not None else "mtp"

    def _common(self, runner: Any, rank: int) -> None:
        config = self.fd_config
        runner.fd_config, runner.quant_config = config, None
        for name in ("cache_config", "scheduler_config", "parallel_config", "model_config", "speculative_config"):
            setattr(runner, name, getattr(config, name))
        runner.local_rank = self.setup.group * self.setup.ranks + rank
        runner.device_id = int(config.parallel_config.device_ids.split(",")[rank])

    def launched(self, command: str) -> tuple[str, Callable[[], None]]:
        """Name and body of a process that the engine launched."""
        words = shlex.split(command.partition(" >")[0])
        script = next(word for word in words if word.endswith(".py"))
        arguments = words[words.index(script) :]
        rank = arguments[arguments.index("--rank") + 1]
        transfer = script.endswith("cache_transfer_manager.py")
        module = self.rig.transfer if transfer else self.rig.messager

        def body() -> None:
            with mock.patch.object(sys, "argv", arguments):
                args = module.parse_args()
            vars(module)["args"] = args
            if transfer:
                module.CacheTransferManager(args)
            else:
                module.main()

        return f"{'transfer manager' if transfer else 'cache messager'} {rank}", body

    def profile(self) -> Started:
        """See `Rig.profile`."""
        with self.stood_in():
            runner = self.runners["runner 0"] = self._runner(0)
            runner._dummy_run = constant(None)
            alone = {"runner 0": runner.profile_run}
            self._settle(alone)
        return self._outcome(alone)

    # -- the course of events ----------------------------------------------------------------------------------------

    def start(self, restarts: int) -> Started:
        """Lets every process run until it waits, over and over, until nothing moves any more."""
        with self.stood_in():
            pending: dict[str, Callable[[], None]] = {"engine": self.engine}
            for rank in range(self.setup.ranks):
                pending[f"runner {rank}"] = lambda rank=rank: self.worker(rank)  # type: ignore[misc]
            self._settle(pending)
            for _again in range(restarts):
                for name, runner in self.runners.items():
                    runner.clear_cache()
                    self.joined.pop(name, None)
                    if name not in pending:
                        pending[name] = runner.initialize_kv_cache
                self._settle(pending)
        return self._outcome(pending)

    def _outcome(self, pending: Mapping[str, Callable[[], None]]) -> Started:
        from kvmend_fixes.proofs._xpu_rig import Started

        started = Started(waiting=tuple(name for name in pending if name != "engine"))
        for name, tensors in self.made.items():
            started.created_bytes[name] = sum(tensor.bytes for tensor in tensors)
            for tensor in tensors:
                started.creators.setdefault(tensor.name, set()).add(name)
        for name, names in self.joined.items():
            for each in names:
                started.attached.setdefault(each, set()).add(name)
        started.caches = {
            name: [tensor.name for tensor in runner.share_inputs.get("caches", [])]
            for name, runner in self.runners.items()
        }
        started.signals = {
            name: [int(each) for each in value]
            for name, value in self.values.items()
            if name.startswith("cache_ready_signal")
        }
        return started

    def _settle(self, pending: dict[str, Callable[[], None]]) -> None:
        known = 0
        while True:
            before = (len(pending), known, self._moved())
            for name, body in list(pending.items()):
                if self._goes_on(name, body):
                    del pending[name]
            for command in self.commands[known:]:
                name, body = self.launched(command)
                pending[name] = body
            known = len(self.commands)
            if before == (len(pending), known, self._moved()):
                return

    def _moved(self) -> tuple[Any, ...]:
        return tuple((name, tuple(int(each) for each in value)) for name, value in sorted(self.values.items()))

    def _goes_on(self, name: str, body: Callable[[], None]) -> bool:
        """Whether a process got through; what it did before it had to wait is done again, so it does not count."""
        self.process = name
        made, joined = self.made.pop(name, []), self.joined.pop(name, [])
        try:
            body()
        except Waits:
            # A creator waits for its fellow ranks after it has created: then it has created.
            return bool(self.made.get(name)) and name != "engine"
        finally:
            if name.startswith("runner") and not self.made.get(name) and made:
                self.made[name] = made
            if not self.joined.get(name) and joined:
                self.joined[name] = joined
        return True
