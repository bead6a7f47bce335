"""The startup hook in a process of the installed vLLM that loads no plugins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_CODE = """
import json
from kvmend.startup import watch
watch("vllm")
from vllm.plugins import load_general_plugins
load_general_plugins()
import vllm.v1.core.sched.scheduler
from vllm.v1.core.kv_cache_manager import KVCacheManager
from kvmend.applier import results
by_hook = {result.fix: str(result.outcome) for result in results()}
from kvmend.loading import load_vllm
load_vllm()
layers, function = 0, KVCacheManager.get_computed_blocks
while hasattr(function, "__wrapped__"):
    layers, function = layers + 1, function.__wrapped__
print("ANSWER", json.dumps([by_hook, {result.fix: str(result.outcome) for result in results()}, layers]))
"""


@pytest.mark.engine
def test_the_startup_hook_brings_the_fix_in_without_plugins_and_once_with_them(tmp_path: Path) -> None:
    """Catches a hook that vLLM's import order gets past, and a fix that two ways in apply twice."""
    done = subprocess.run(
        [sys.executable, "-c", _CODE],
        env=os.environ | {"VLLM_PLUGINS": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    by_hook, with_plugin, layers = json.loads(done.stdout.rpartition("ANSWER ")[2].splitlines()[0])
    assert (by_hook["vllm-prefix-stats"], with_plugin["vllm-prefix-stats"], layers) == ("applied", "applied", 1)
