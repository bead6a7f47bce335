"""Starting engines, waiting for them, ending them, and saying what went wrong with them in a few lines."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

_TAIL_LINES = 4
_LINE_WIDTH = 160
_ERROR = re.compile(r"(?:[\w.]*(?:Error|Exception)|\S+: error): \S")
_PREFIX = re.compile(r"^(\([^)]*pid=\d+\) )?((ERROR|WARNING|INFO) [\d-]+ [\d:]+ \[[^\]]*\] ?)?(\[rank\d+\]: ?)?")


class DemoError(Exception):
    """The demo cannot go on. `str()` is one line that an operator can act on.

    Attributes:
        log: The engine's log, or None if there is none.
    """

    def __init__(self, message: str, log: Path | None = None) -> None:
        self.log = log
        super().__init__(message)

    @property
    def last_words(self) -> list[str]:
        """The few lines of the log that say most: its errors, or else its end."""
        return last_words(self.log) if self.log else []


def last_words(log: Path) -> list[str]:
    """Up to 4 lines of a log: the distinct error messages, the first one first, or else the last lines."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines = [stripped for line in text.splitlines() if (stripped := _PREFIX.sub("", line).strip())]
    errors = list(dict.fromkeys(line for line in lines if _ERROR.match(line)))
    return [line[:_LINE_WIDTH] for line in (errors[:_TAIL_LINES] or lines[-_TAIL_LINES:])]


def environment(inherited: Mapping[str, str], *, mended: bool, multiprocessing: bool, folder: Path) -> dict[str, str]:
    """Environment of an engine: offline, quick to start, on loopback, with kvmend off or on.

    Args:
        inherited: The environment of the demo itself.
        mended: Whether kvmend is on.
        multiprocessing: Whether an offline engine runs its core and its workers in processes of their own.
        folder: Where kvmend and Python may leave files.
    """
    # Keys, ports and a shared metrics folder of a server that runs beside the demo are not for the demo's engines.
    foreign = ("VLLM_API_KEY", "VLLM_PORT", "PROMETHEUS_MULTIPROC_DIR")
    result = {name: value for name, value in inherited.items() if name not in foreign}
    result |= {
        "KVMEND": "1" if mended else "0",
        "KVMEND_STATE_DIR": str(folder / "reports"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if multiprocessing else "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # A model this small gains nothing from threads, and two engines must not fight for the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        # Without this the CPU engine spends half a minute on compiling although it is told to be eager.
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if mended and result.get("KVMEND_VLLM_PREFIX_STATS") == "0":
        result["KVMEND_VLLM_PREFIX_STATS"] = "1"
    plugins = result.get("VLLM_PLUGINS")
    if plugins is not None and "kvmend" not in plugins.split(","):
        result["VLLM_PLUGINS"] = ",".join(filter(None, (plugins, "kvmend")))
    if "PYTHONDONTWRITEBYTECODE" in result and not _compiled("vllm"):
        # Compiling vLLM and torch anew in each process would take longer than the rest of the start.
        del result["PYTHONDONTWRITEBYTECODE"]
        result["PYTHONPYCACHEPREFIX"] = str(folder.parent / "pycache")
    return result


def _compiled(package: str) -> bool:
    found = importlib.util.find_spec(package)
    return bool(found and found.origin and Path(importlib.util.cache_from_source(found.origin)).exists())


class Process:
    """One engine: a process group of its own whose output goes to a log."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path, what: str) -> None:
        self._popen = popen
        self.log = log
        self.what = what
        self.begin = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self.begin

    @property
    def returncode(self) -> int | None:
        """Exit code, or None while it runs."""
        return self._popen.poll()

    def wait_until(self, ready: Callable[[], bool], deadline: float, doing: str) -> bool:
        """Waits until `ready()` or until the process has ended; `doing` is what it has `deadline` seconds for.

        Returns:
            Whether `ready()`; False if the process ended first.

        Raises:
            DemoError: Neither happened within `deadline` seconds from its start.
        """
        while self.returncode is None:
            if ready():
                return True
            if self.seconds > deadline:
                raise DemoError(f"{self.what} did not {doing} within {deadline:.0f} s", self.log)
            time.sleep(0.1)
        return ready()

    def died(self) -> DemoError:
        """The error for a process that ended by itself when it should not have."""
        code = self.returncode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        return DemoError(f"{self.what} {how}", self.log)

    def stop(self, patience: float = 15.0) -> None:
        """Asks the process to end, and then ends whatever is left of its group."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(patience)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()


class Processes:
    """All engines of one demo: none is started after `close`, and none is left by it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[Process] = set()
        self._closed = False

    @contextlib.contextmanager
    def start(self, arguments: Sequence[str], env: Mapping[str, str], log: Path, what: str) -> Iterator[Process]:
        """Runs `python ARGUMENTS` for the length of a `with` block."""
        with self._lock:
            if self._closed:
                raise DemoError("the demo was ended")
            with log.open("ab") as stream:
                popen = subprocess.Popen(
                    [sys.executable, *arguments],
                    env=dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            process = Process(popen, log, what)
            self._running.add(process)
        try:
            yield process
        finally:
            process.stop()
            with self._lock:
                self._running.discard(process)

    def close(self) -> None:
        """Ends every engine that still runs."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for process in running:
            process.stop(patience=2.0)
