"""Runs the installed FastDeploy's own start of the KV cache, process by process, on a machine without any device.

The engine's launch, the command lines it builds, the transfer manager and the cache messager that parse them, the XPU
runner and its MTP proposer are FastDeploy's. Stood in for are the device operators, `paddle.full` (which only notes
what it was asked for), shared memory, and waiting: whoever would wait lets the others go first.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field

from kvmend_fixes.proofs._xpu_run import Run
from kvmend_fixes.proofs._xpu_standins import constant, stub


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


class Rig:
    """The modules of the installed FastDeploy, imported as on an XPU machine."""

    def __init__(self) -> None:
        for name in ("xpu", "gpu"):
            full = f"fastdeploy.model_executor.ops.{name}"
            sys.modules.setdefault(full, stub(full))
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
        return Run(self, setup).start(restarts)

    def profile(self, setup: Setup) -> Started:
        """Lets one runner profile the memory, which creates KV tensors whatever the configuration is."""
        return Run(self, setup).profile()
