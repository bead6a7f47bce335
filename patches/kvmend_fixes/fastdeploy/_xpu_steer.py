"""Leads a runner's own decision, and waits for another creator without waiting in silence."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Mapping
from typing import Any

from kvmend.api import strict
from kvmend_fixes.fastdeploy._xpu_source import Configuration

#: Seconds between two looks at the ready signal, between two log lines, and until a strict process stops.
LOOK_EVERY = 1.0
SPEAK_EVERY = 30.0
STOP_AFTER = 600.0


class CreatorMissing(RuntimeError):
    """KVMEND_STRICT=1: nobody created the KV tensors that this process waits for."""


class Seen:
    """An object as it is, but for some attributes; what is set on it is set on the object.

    The object itself never changes, so threads beside the one that decides see nothing of it, and there is nothing
    to put back.
    """

    __slots__ = ("_kvmend_instead", "_kvmend_of")

    def __init__(self, of: Any, instead: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_kvmend_of", of)
        object.__setattr__(self, "_kvmend_instead", instead)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(object.__getattribute__(self, "_kvmend_of"))

    def __getattr__(self, name: str) -> Any:
        instead = object.__getattribute__(self, "_kvmend_instead")
        return instead[name] if name in instead else getattr(object.__getattribute__(self, "_kvmend_of"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_kvmend_of"), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(object.__getattribute__(self, "_kvmend_of"), name)


def led(runner: Any, instead: Mapping[str, Any]) -> Any:
    """A runner (or proposer) whose configuration reads differently, under every name it can be reached by.

    Args:
        runner: Has `fd_config`, and usually its parts as attributes of its own.
        instead: What `splitwise_role`, `num_cpu_blocks` and `kvcache_storage_backend` are to read as.
    """
    scheduling = Seen(runner.fd_config.scheduler_config, instead)
    caching = Seen(runner.fd_config.cache_config, instead)
    whole = Seen(runner.fd_config, {"scheduler_config": scheduling, "cache_config": caching})
    return Seen(runner, {"fd_config": whole, "scheduler_config": scheduling, "cache_config": caching})


def configuration_of(runner: Any) -> Configuration:
    """The configuration of the process that a runner (or proposer) lives in."""
    caching = runner.fd_config.cache_config
    return Configuration(
        splitwise=runner.fd_config.scheduler_config.splitwise_role != "mixed",
        cpu_blocks=(getattr(caching, "num_cpu_blocks", None) or 0) > 0,
        storage=bool(getattr(caching, "kvcache_storage_backend", None)),
        prefix_caching=bool(caching.enable_prefix_caching),
    )


def describe(runner: Any) -> str:
    """The configuration in the operator's words."""
    caching = runner.fd_config.cache_config
    return (
        f"role {runner.fd_config.scheduler_config.splitwise_role}, "
        f"num_cpu_blocks {getattr(caching, 'num_cpu_blocks', None) or 0}, "
        f"storage backend {getattr(caching, 'kvcache_storage_backend', None) or 'none'}, "
        f"prefix caching {'on' if caching.enable_prefix_caching else 'off'}"
    )


def await_creator(runner: Any, suffix: str, who: str, log: logging.Logger, counters: Any) -> None:
    """Returns when the creator has set this rank's ready signal. Never creates behind another's back.

    Args:
        runner: The runner or proposer that is about to attach.
        suffix: Attribute of its parallel configuration that completes the name of the signal.
        who: The process that creates here and the rule that says so, for the reader of the log.
        log: Logger; a line every `SPEAK_EVERY` seconds.
        counters: `awaited` and `overdue` are bumped.

    Raises:
        CreatorMissing: After `STOP_AFTER` seconds under KVMEND_STRICT=1.
    """
    counters.awaited += 1
    rank, signal = _ready_signal(runner, suffix)
    if signal is None:
        return  # the original opens the same signal and says what is wrong with it
    began = time.monotonic()
    spoken = began
    while signal.value[rank] != 1:
        time.sleep(LOOK_EVERY)
        now = time.monotonic()
        if now - spoken < SPEAK_EVERY:
            continue
        spoken = now
        counters.overdue += 1
        message = (
            f"kvmend: rank {rank} has waited {now - began:.0f} s for the KV tensors, which {who} creates; "
            f"configuration: {describe(runner)}; "
            f"cache_ready_signal.{getattr(runner.parallel_config, suffix)} reads {[int(each) for each in signal.value]}"
        )
        if now - began >= STOP_AFTER and strict():
            raise CreatorMissing(message)
        log.warning("%s. If that process is not running, its log says why", message)


def _ready_signal(runner: Any, suffix: str) -> tuple[int, Any]:
    numpy: Any = importlib.import_module("numpy")
    signals: Any = importlib.import_module("fastdeploy.inter_communicator")

    ranks = runner.parallel_config.tensor_parallel_size
    try:
        signal = signals.IPCSignal(
            name="cache_ready_signal",
            array=numpy.zeros(shape=[ranks], dtype=numpy.int32),
            dtype=numpy.int32,
            suffix=getattr(runner.parallel_config, suffix),
            create=False,
        )
    except Exception:
        return 0, None
    return runner.local_rank % ranks, signal
