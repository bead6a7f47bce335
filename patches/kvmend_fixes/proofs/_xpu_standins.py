"""Stand-ins for what a device, shared memory and other processes would do, one set per start."""

from __future__ import annotations

import contextlib
import importlib
import math
import time
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from kvmend_fixes.proofs._xpu_rig import Rig, Setup

_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1, "int8": 1}
LAYERS = 2


class Waits(Exception):
    """A process would wait now."""


def constant(value: Any) -> Callable[..., Any]:
    """A function that returns `value` whatever it is given."""
    return lambda *args, **kwargs: value


class Tensor:
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


def stub(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = []

    def __getattr__(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return lambda *args, **kwargs: None

    module.__getattr__ = __getattr__  # type: ignore[method-assign]
    return module


class StandIns:
    """What one start sees instead of devices and shared memory, and what it did with it.

    Attributes:
        process: The process that is running now.
        made: The KV tensors that each process has published.
        joined: The names of those that each process has attached to.
        commands: Command lines of the processes launched.
        values: Shared arrays by name.
    """

    def __init__(self, rig: Rig, setup: Setup) -> None:
        self.rig, self.setup = rig, setup
        self.values: dict[str, Any] = {}
        self.commands: list[str] = []
        self.process = ""
        self.made: dict[str, list[Tensor]] = {}
        self.joined: dict[str, list[str]] = {}

    def backend(self, *_args: Any, **_kwargs: Any) -> Any:
        """The attention backend."""
        raise NotImplementedError

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

    def full(self, shape: Any, fill_value: Any = 0, dtype: Any = "float32", **_others: Any) -> Tensor:
        """Stands in for `paddle.full` and `paddle.empty`."""
        return Tensor(shape, dtype)

    def publish(self, tensor: Tensor, name: str, *_others: Any) -> None:
        """Stands in for `set_data_ipc`: the moment a KV tensor is there for others."""
        tensor.name = name
        self.made.setdefault(self.process, []).append(tensor)

    def attach(self, tensor: Any, name: str, shape: Any, *_others: Any) -> Tensor:
        """Stands in for `share_external_data` in all its spellings."""
        known = {made.name: made for tensors in self.made.values() for made in tensors}
        if name not in known:
            raise KeyError(f"{self.process} attaches to {name}, which nobody has created")
        if known[name].shape != [int(each) for each in shape]:
            raise ValueError(f"{self.process} attaches to {name} as {shape}, it was created as {known[name].shape}")
        self.joined.setdefault(self.process, []).append(name)
        return known[name]

    def sleep(self, _seconds: float) -> None:
        raise Waits

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
            put(attention, get_attention_backend=lambda *args: self.backend)
            yield
