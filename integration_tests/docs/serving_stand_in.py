"""A `vllm serve` for machines without torch: the installed release's own plugin loader and KV cache manager.

It stands in for the command of that name in the sandbox of the documentation's tests. vLLM's files are those of the
release; what they import beside the few modules below is made up on the spot. There are two processes, as in a server:
the one that was started and an EngineCore. Both load plugins, say when they are ready, and wait for SIGTERM.
"""

from __future__ import annotations

import abc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

REAL = frozenset(
    {
        "vllm.envs",
        "vllm.logger",
        "vllm.logging_utils",
        "vllm.plugins",
        "vllm.v1.core.kv_cache_coordinator",
        "vllm.v1.core.kv_cache_manager",
        "vllm.v1.core.sched.scheduler",
        "vllm.v1.metrics.stats",
    }
)
ENGINE = "EngineCore"


class _Kind(abc.ABCMeta):
    """A class that has whatever member is asked of it, as an enumeration has."""

    def __getattr__(cls, name: str) -> Any:
        if not name.isupper():
            raise AttributeError(name)
        member = object()
        setattr(cls, name, member)
        return member


class _MadeUp(types.ModuleType):
    """A module that has whatever is asked of it: a class for a name that looks like one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Kind(name, (), {}) if name[:1].isupper() else MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _Maker(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes up what is not installed, and every module of vLLM that is not named above."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        top = name.partition(".")[0]
        if top == "vllm":
            made_up = not any(name == real or name.startswith("vllm.logging_utils.") for real in REAL)
        else:
            made_up = top not in sys.stdlib_module_names and importlib.machinery.PathFinder.find_spec(top) is None
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if made_up else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _MadeUp(spec.name)
        parent, _, name = spec.name.rpartition(".")
        if parent:
            module.__path__ = [f"{folder}/{name}" for folder in sys.modules[parent].__path__]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: it makes itself up as it is used."""


def _pretend() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    package = _MadeUp("vllm")
    package.__path__ = list(spec.submodule_search_locations or ())
    package.__file__, package.__spec__ = spec.origin, spec
    sys.modules["vllm"] = package
    sys.meta_path.insert(0, _Maker())


def _load_a_model() -> None:
    """Takes as long as the report on what was imported takes to be written: a real one takes longer."""
    folder = os.environ.get("KVMEND_STATE_DIR")
    give_up = time.monotonic() + 20
    while folder and time.monotonic() < give_up:
        reports = Path(folder).glob(f"kvmend-*{os.getpid()}*.json")
        if any('"armed"' not in report.read_text(encoding="utf-8") for report in reports):
            break
        time.sleep(0.1)


def main() -> None:
    """Starts, says so, and ends with SIGTERM as a server does, its EngineCore with it."""
    if ENGINE in sys.argv:
        multiprocessing.current_process().name = f"{ENGINE}_DP0"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _pretend()
    importlib.import_module("vllm.logger")
    importlib.import_module("vllm.plugins").load_general_plugins()
    if ENGINE in sys.argv:
        importlib.import_module("vllm.v1.core.sched.scheduler")
        _load_a_model()
        os.close(int(sys.argv[-1]))
        signal.pause()
    told, tells = os.pipe()
    engine = subprocess.Popen([sys.executable, __file__, ENGINE, str(tells)], pass_fds=[tells])
    os.close(tells)
    try:
        os.read(told, 1)  # ends when the EngineCore is ready, or gone
        if engine.poll() is not None:
            sys.exit("Engine core initialization failed.")
        print("INFO:     Application startup complete.", flush=True)
        signal.pause()
    finally:
        engine.terminate()
        engine.wait()


if __name__ == "__main__":
    main()
