"""Runs code in fresh interpreters and brings its answer back as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INTEGRATION_TESTS = Path(__file__).resolve().parents[1]
ROOT = INTEGRATION_TESTS.parent
#: Where the host and the fixes are, for interpreters that have no kvmend installed.
SOURCES = (ROOT / "plugins", ROOT / "patches")

_PRELUDE = """\
import json as _json, os as _os
def answer(value, _json=_json, _os=_os):
    with open(_os.environ["TOY_ANSWER"], "w", encoding="utf-8") as stream:
        _json.dump(value, stream)
"""


@dataclass(frozen=True)
class Answer:
    """What a process left behind; `value` is what it gave to `answer(...)`, or None."""

    value: Any
    code: int
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        """The last line of standard error: what an operator sees of a crash."""
        lines = self.stderr.strip().splitlines()
        return lines[-1] if lines else ""


def clean_environment(env: Mapping[str, str] | None = None, path: Iterable[Path | str] = ()) -> dict[str, str]:
    """This process's environment without any switch of kvmend, with `path` and these tests importable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVMEND", "VLLM_", "FD_"))}
    kept["PYTHONPATH"] = os.pathsep.join(str(each) for each in (*path, INTEGRATION_TESTS))
    # Releases are rewritten within one second, which is the resolution of cached byte code.
    kept["PYTHONDONTWRITEBYTECODE"] = "1"
    return kept | dict(env or {})


def run(
    code: str,
    *,
    path: Iterable[Path | str] = (),
    env: Mapping[str, str] | None = None,
    python: str = sys.executable,
    fails: bool = False,
    timeout: float = 60,
) -> Answer:
    """Runs code that may call `answer(value)` with anything JSON can hold.

    Args:
        code: The program; common indentation is taken off.
        path: Folders to import from.
        env: Variables to set.
        python: The interpreter.
        fails: Whether a non-zero exit code is what the caller expects.
        timeout: Seconds.
    """
    with tempfile.TemporaryDirectory(prefix="kvmend-unit-") as folder:
        place = Path(folder) / "answer.json"
        done = subprocess.run(
            [python, "-c", _PRELUDE + textwrap.dedent(code)],
            env=clean_environment(env, path) | {"TOY_ANSWER": str(place)},
            capture_output=True,
            text=True,
            cwd=folder,
            timeout=timeout,
            check=False,
        )
        value = json.loads(place.read_text(encoding="utf-8")) if place.exists() else None
    assert bool(done.returncode) == fails, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return Answer(value=value, code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def kvmend(
    *arguments: str, path: Iterable[Path | str] = (), env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Answer:
    """Runs the command line in a process of its own; `value` is its standard output as JSON if it is JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "kvmend", *arguments],
        env=clean_environment({"COLUMNS": "200"} | dict(env or {}), path),
        capture_output=True,
        text=True,
        cwd=cwd or tempfile.gettempdir(),
        timeout=120,
        check=False,
    )
    try:
        value = json.loads(done.stdout)
    except ValueError:
        value = None
    return Answer(value=value, code=done.returncode, stdout=done.stdout, stderr=done.stderr)
