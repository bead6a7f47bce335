"""This folder again, once for each real FastDeploy tree, in a process of its own.

Trees share the module name `fastdeploy` and bring Paddle along, so they cannot share an interpreter. Which
interpreter: KVMEND_FASTDEPLOY_PYTHON, or the one that runs the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fdtree
import pytest

PYTHON = os.environ.get("KVMEND_FASTDEPLOY_PYTHON", sys.executable)
TREES = fdtree.real_trees()


def usable() -> bool:
    """Whether the interpreter has what a FastDeploy tree imports."""
    return subprocess.run([PYTHON, "-c", "import paddle"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not TREES, reason="no real tree: name some in KVMEND_FASTDEPLOY_TREES")
@pytest.mark.parametrize("path", TREES, ids=lambda path: path.name)
def test_the_same_tests_pass_on_a_real_tree(path: Path, record_property: Callable[[str, object], None]) -> None:
    """Catches a double that is kinder than the real thing, and a tree on which the fix does not hold."""
    if not usable():
        pytest.skip(f"{PYTHON} has no paddle; set KVMEND_FASTDEPLOY_PYTHON")
    command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    environment = {**os.environ, "KVMEND_FASTDEPLOY_TREE": str(path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    fdtree.USED.append(path.name)
    record_property("tree", path.name)
    assert done.returncode == 0, done.stdout[-6000:]
    assert f"tested on: {path.name}" in done.stdout
