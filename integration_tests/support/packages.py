"""Installs requirements into a folder with whatever installer is at hand, and builds the distribution."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.interpreter import ROOT


def install(target: Path, *requirements: str) -> Path:
    """Installs into a folder that can then stand on PYTHONPATH; returns it."""
    if importlib.util.find_spec("uv"):
        command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
    elif uv := shutil.which("uv"):
        command = [uv, "pip", "install", "--quiet", "--python", sys.executable]
    else:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--target", str(target), *requirements], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target


def build(folder: Path) -> tuple[Path, Path]:
    """Builds wheel and source distribution of this checkout into a folder; returns both."""
    tools = install(folder / "tools", "hatchling>=1.18")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tools)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist
