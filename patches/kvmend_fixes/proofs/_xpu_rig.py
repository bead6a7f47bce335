"""Runs the installed FastDeploy's own start of the KV cache, process by process, on a machine without any device.

The engine's launch, the command lines it builds, the transfer manager and the cache messager that parse them, the XPU
runner and its MTP proposer are FastDeploy's. Stood in for are the device operators, `paddle.full` (which only notes
what it was asked for), shared memory, and waiting: whoever would wait lets the others go first.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import shlex
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1, "int8": 1}
_PORT = 9923
LAYERS = 2


class _Waits(Exception):
    """A process would wait now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One configuration of a server.

    Attributes:
        role: "mixed", "prefill" or "decode".
        cpu_blocks: Blocks of swap space.
        storage: Storage backend or None.
        prefix_caching: Whether prefix caching is on.
        mtp: Whether there is an MTP proposer.
        ranks: Tensor parallel size.
        group: Data parallel rank; it has ready signals and devices of its own.
        blocks: KV blocks on the device.
    """

    role: str = "mixed"
    cpu_blocks: int = 0
    storage: str | None = None
    prefix_caching: bool = True
    mtp: bool = False
    ranks: int = 1
    group: int = 0
    blocks: int = 100

    @property
    def name(self) -> str:
        """As in "mixed, 8 cpu blocks, attention_store"."""
        extra = [f"{self.cpu_blocks} cpu blocks", self.storage or "no storage"]
        extra += [] if self.prefix_caching else ["no prefix caching"]
        extra += ["MTP"] if self.mtp else []
        return ", ".join([self.role, *extra])


@dataclass(slots=True)
class Started:
    """What a start led to.

    Attributes:
        creators: For each KV tensor by its name, the processes that created it.
        attached: For each KV tensor by its name, the processes that attached to it.
        created_bytes: Bytes of KV tensors that each process created.
        waiting: Processes that wait for ever.
        caches: For each runner, the names behind its `caches`, in order.
        signals: Values of the ready signals by name.
    """

    creators: dict[str, set[str]] = field(default_factory=dict)
    attached: dict[str, set[str]] = field(default_factory=dict)
    created_bytes: dict[str, int] = field(default_factory=dict)
    waiting: tuple[str, ...] = ()
    caches: dict[str, list[str]] = field(default_factory=dict)
    signals: dict[str, list[int]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of KV tensors created across processes."""
        return sum(self.created_bytes.values())

    @property
    def creator_counts(self) -> set[int]:
        """How many processes created a KV tensor, over all tensors; {0} if nobody created any."""
        return {len(processes) for processes in self.creators.values()} or {0}

    @property
    def count(self) -> int:
        """Creators of the tensors: the one number if it is the same for all, 0 if somebody waits for ever."""
        return 0 if self.waiting else max(self.creator_counts)


class _Tensor:
    """What was asked of `paddle.full`."""

    def __init__(self, shape: Any, dtype: Any) -> None:
        self.shape = [int(each) for each in shape]
        self.dtype = str(dtype).rpartition(".")[2]
        self.name = ""

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return _SIZES.get(self.dtype, 4)

    @property
    def bytes(self) -> int:
        return self.numel() * self.element_size()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


def _stub(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = []  # type: ignore[attr-defined]

    def __getattr__(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return lambda *args, **kwargs: None

    module.__getattr__ = __getattr__  # type: ignore[method-assign]
    return module


class Rig:
    """The modules of the installed FastDeploy, imported as on an XPU machine."""

    def __init__(self) -> None:
        for name in ("xpu", "gpu"):
            full = f"fastdeploy.model_executor.ops.{name}"
            sys.modules.setdefault(full, _stub(full))
        self.paddle = importlib.import_module("paddle")
        # A Paddle that was built for another device lacks these, and FastDeploy asks for them while it is imported.
        for name in ("memory_allocated", "empty_cache"):
            if not hasattr(self.paddle.device.xpu, name):
                setattr(self.paddle.device.xpu, name, constant(0))
        # The platform is decided when FastDeploy is first imported, by how Paddle was built.
        for name in ("xpu", "cuda", "rocm"):
            setattr(self.paddle, f"is_compiled_with_{name}", constant(name == "xpu"))
        self.worker = importlib.import_module("fastdeploy.worker.xpu_model_runner")
        self.prefix = importlib.import_module("fastdeploy.cache_manager.prefix_cache_manager")
        self.transfer = importlib.import_module("fastdeploy.cache_manager.cache_transfer_manager")
        self.messager = importlib.import_module("fastdeploy.cache_manager.cache_messager")
        self.engine = importlib.import_module("fastdeploy.engine.engine")
        self.service = importlib.import_module("fastdeploy.engine.common_engine")
        self.signals_module = importlib.import_module("fastdeploy.inter_communicator")
        self.config = importlib.import_module("fastdeploy.config")
        self.mtp = importlib.import_module("fastdeploy.spec_decode.mtp")
        self.has_mtp = hasattr(self.worker.XPUModelRunner, "_init_speculative_proposer")

    def start(self, setup: Setup, *, restarts: int = 0) -> Started:
        """Starts a server's KV cache; `restarts` more times the runner drops its caches and initializes them anew."""
        return _Run(self, setup).start(restarts)


def constant(value: Any) -> Callable[..., Any]:
    """A function that returns `value` whatever it is given."""
    return lambda *args, **kwargs: value


class _Run:
    """One start."""

    def __init__(self, rig: Rig, setup: Setup) -> None:
        self.rig, self.setup = rig, setup
        self.values: dict[str, Any] = {}
        self.commands: list[str] = []
        self.process = ""
        self.made: dict[str, list[_Tensor]] = {}
        self.joined: dict[str, list[str]] = {}
        self.runners: dict[str, Any] = {}
        self.fd_config = self._config()

    # -- stand-ins ---------------------------------------------------------------------------------------------------

    def signal(self, name: str, array: Any = None, dtype: Any = None, suffix: Any = None, **_others: Any) -> Any:
        """Stands in for IPCSignal: one array per name, whoever opens it."""
        key = name if suffix is None else f"{name}.{suffix}"
        if key not in self.values:
            self.values[key] = array.copy()
        if name == "get_profile_block_num":
            self.values[key][0] = self.setup.blocks
        if name == "swap_space_ready_signal":
            self.values[key][:] = 1
        return SimpleNamespace(value=self.values[key], shm=None, clear=lambda: None)

    def full(self, shape: Any, fill_value: Any = 0, dtype: Any = "float32", **_others: Any) -> _Tensor:
        """Stands in for `paddle.full` and `paddle.empty`."""
        return _Tensor(shape, dtype)

    def publish(self, tensor: _Tensor, name: str, *_others: Any) -> None:
        """Stands in for `set_data_ipc`: the moment a KV tensor is there for others."""
        tensor.name = name
        self.made.setdefault(self.process, []).append(tensor)

    def attach(self, tensor: Any, name: str, shape: Any, *_others: Any) -> _Tensor:
        """Stands in for `share_external_data` in all its spellings."""
        known = {made.name: made for tensors in self.made.values() for made in tensors}
        if name not in known:
            raise KeyError(f"{self.process} attaches to {name}, which nobody has created")
        if known[name].shape != [int(each) for each in shape]:
            raise ValueError(f"{self.process} attaches to {name} as {shape}, it was created as {known[name].shape}")
        self.joined.setdefault(self.process, []).append(name)
        return known[name]

    def sleep(self, _seconds: float) -> None:
        raise _Waits

    def launch(self, command: str, **_others: Any) -> Any:
        """Stands in for `subprocess.Popen`: a retried launch is the same process."""
        if command not in self.commands:
            self.commands.append(command)
        return SimpleNamespace(poll=lambda: None, pid=1)

    @contextlib.contextmanager
    def stood_in(self) -> Iterator[None]:
        """All stand-ins in place."""
        rig = self.rig
        quiet = SimpleNamespace(Thread=lambda *args, **kwargs: mock.MagicMock(), Lock=mock.MagicMock)
        with contextlib.ExitStack() as stack:

            def put(where: Any, **named: Any) -> None:
                for name, value in named.items():
                    stack.enter_context(mock.patch.object(where, name, value, create=True))

            paddle = rig.paddle
            put(paddle, full=self.full, empty=self.full, set_device=constant(None))
            put(paddle.device, set_device=constant(None), xpu=mock.MagicMock(), cuda=mock.MagicMock())
            put(time, sleep=self.sleep)
            ipc = {"set_data_ipc": self.publish, "share_external_data": self.attach, "IPCSignal": self.signal}
            for module in (rig.worker, rig.mtp, rig.transfer, rig.messager):
                put(module, **ipc)
            for module in (rig.prefix, rig.signals_module):
                put(module, IPCSignal=self.signal)
            nothing = constant(None)
            put(rig.transfer, share_external_data_=self.attach, set_device=nothing, memory_allocated=nothing)
            put(rig.transfer, EngineCacheQueue=mock.MagicMock(), threading=quiet, set_data_ipc=self.publish)
            put(rig.transfer, logger=mock.MagicMock())
            put(rig.messager, set_device=nothing, memory_allocated=nothing, logger=mock.MagicMock())
            put(rig.messager, CacheMessager=mock.MagicMock(), CacheMessagerV1=mock.MagicMock())
            popen = SimpleNamespace(Popen=self.launch)
            put(rig.prefix, EngineCacheQueue=mock.MagicMock(), threading=quiet, subprocess=popen)
            for name in ("_init_cpu_cache", "_init_storage", "_init_control"):
                put(rig.transfer.CacheTransferManager, **{name: nothing})
            attention = importlib.import_module("fastdeploy.model_executor.layers.attention")
            put(attention, get_attention_backend=lambda *args: self._backend)
            yield

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
            device_ids=",".join(str(setup.group * setup.ranks + rank) for rank in range(setup.ranks)),
        )
        return SimpleNamespace(
            cache_config=cache,
            scheduler_config=SimpleNamespace(splitwise_role=setup.role, max_num_seqs=8),
            parallel_config=parallel,
            model_config=model,
            quant_config=None,
            speculative_config=self.rig.config.SpeculativeConfig(drafts),
            master_ip="127.0.0.1",
            routing_replay_config=SimpleNamespace(enable_routing_replay=False),
        )

    def _backend(self, *_args: Any, **_kwargs: Any) -> Any:
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
        manager = self.rig.prefix.PrefixCacheManager(
            self.fd_config, self.setup.ranks, self.setup.role, local_data_parallel_id=self.setup.group
        )
        service = object.__new__(self.rig.service.EngineService)
        service.cfg = self.fd_config
        service.resource_manager = SimpleNamespace(cache_manager=manager, reset_cache_config=constant(None))
        engine = object.__new__(self.rig.engine.LLMEngine)
        engine.cfg, engine.engine, engine.worker_proc = self.fd_config, service, None
        engine.ipc_signal_suffix = self.fd_config.parallel_config.engine_worker_queue_port
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
        runner.attn_backends, runner.share_inputs, runner.forward_meta = [self._backend()], {}, None
        runner.speculative_method = runner.spec_method = self._method(kind)
        runner.get_model = constant(None)
        if self.rig.has_mtp:
            with mock.patch.object(self.rig.mtp.MTPProposer, "__init__", constant(None)):
                runner._init_speculative_proposer()
            if runner.proposer is not None:
                self._common(runner.proposer, rank)
                runner.proposer.attn_backends, runner.proposer.model_inputs = [self._backend()], {}
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
            module.args = args
            if transfer:
                module.CacheTransferManager(args)
            else:
                module.main()

        return f"{'transfer manager' if transfer else 'cache messager'} {rank}", body

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
        except _Waits:
            # A creator waits for its fellow ranks after it has created: then it has created.
            return bool(self.made.get(name)) and name != "engine"
        finally:
            if name.startswith("runner") and not self.made.get(name) and made:
                self.made[name] = made
            if not self.joined.get(name) and joined:
                self.joined[name] = joined
        return True
