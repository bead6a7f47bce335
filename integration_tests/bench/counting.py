"""Counts instructions with valgrind's callgrind, for benchmarks whose differences are below the noise of a clock.

The same program takes the same number of instructions however busy the machine is. A benchmark runs a program of its
own under callgrind (`counted`); the program counts parts of what it does (`Counter`), each under a label.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: The argument with which a benchmark runs itself under callgrind; the library follows.
OPTION = "--count"


class Counter:
    """What a program under callgrind counts.

    Args:
        library: What `counted` has built.
    """

    def __init__(self, library: str) -> None:
        self._requests = ctypes.CDLL(library)

    @contextmanager
    def part(self, label: str) -> Iterator[None]:
        """Puts what is counted in the `with` block under a label."""
        self._requests.start()
        self._requests.zero()
        yield
        self._requests.dump(label.encode())
        self._requests.stop()

    def toggle(self) -> None:
        """Counts from here on, or no more."""
        self._requests.toggle()

    def call(self, function: Callable[[], Any]) -> Any:
        """Calls a function and counts it."""
        self._requests.toggle()
        result = function()
        self._requests.toggle()
        return result


def lacking() -> str:
    """Why nothing can be counted here, or ""."""
    missing = [program for program in ("valgrind", "cc") if shutil.which(program) is None]
    return f"there is no {' and no '.join(missing)} on PATH" if missing else ""


def counted(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, int]:
    """Runs a program under callgrind.

    Args:
        command: The program; `OPTION` and the library are added.
        environment: More environment variables.

    Returns:
        Instructions by label.

    Raises:
        SystemExit: Valgrind's header is not there, or the program failed.
    """
    with tempfile.TemporaryDirectory(prefix="kvmend-bench-") as name:
        folder = Path(name)
        library, source = folder / "requests.so", Path(__file__).with_name("callgrind_requests.c")
        built = subprocess.run(
            ["cc", "-O1", "-shared", "-fPIC", "-o", library, source], capture_output=True, text=True, check=False
        )
        if built.returncode:
            raise SystemExit(f"valgrind's header is not to be had: {built.stderr.splitlines()[0]}")
        callgrind = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no"]
        callgrind += [f"--callgrind-out-file={folder / 'counts'}.%p", *command, OPTION, str(library)]
        ended = subprocess.run(callgrind, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, check=False)
        if ended.returncode:
            raise SystemExit(f"{command[-1]} under callgrind ended with exit code {ended.returncode}")
        return read(folder)


def read(folder: Path) -> dict[str, int]:
    """Instructions by label, from what callgrind has written."""
    figures = {}
    for path in folder.glob("counts.*"):
        text = path.read_text(encoding="utf-8", errors="replace")
        label = re.search(r"^desc: Trigger: Client Request: (.+)$", text, re.MULTILINE)
        total = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
        if label and total:
            figures[label[1]] = int(total[1])
    return figures
