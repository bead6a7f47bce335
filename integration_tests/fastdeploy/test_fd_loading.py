"""FastDeploy's own plugin loader brings kvmend in, and `kvmend check` says when it would not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvmend.locate import locate_path
from kvmend_fixes.fastdeploy import FASTDEPLOY
from support.toyfw import write_dist_info

_ROOT = Path(__file__).resolve().parents[2]
_ENTRY_POINTS = """
[fastdeploy.reasoning_parser_plugins]
kvmend = kvmend.loading:load_fastdeploy

[kvmend.fixes.fastdeploy]
fastdeploy-prefill-cache = kvmend_fixes.fastdeploy.prefill_cache:FIX
fastdeploy-xpu-kv-cache = kvmend_fixes.fastdeploy.xpu_kv_cache:FIX
"""
_IMPORT = """
import json, sys
import fastdeploy
import fastdeploy.engine.sched.resource_manager_v1, fastdeploy.cache_manager.prefix_cache_manager
journal = sys.modules.get("kvmend.applier")
answer = {result.fix: str(result.outcome) for result in journal.results()} if journal else {}
print("ANSWER", json.dumps(answer))
"""


def imported(tree: Any, folder: Path, code: str = _IMPORT, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process in which kvmend is installed and FastDeploy is imported from the tree."""
    write_dist_info(folder, "kvmend", "0.1.0", {"entry_points.txt": _ENTRY_POINTS})
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVMEND", "FD_"))}
    paths = [tree.path, folder, _ROOT / "plugins", _ROOT / "patches"]
    return subprocess.run(
        [sys.executable, "-c", code],
        env=kept | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "FD_LOG_DIR": str(folder / "log")} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def outcomes(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, str] = json.loads(done.stdout.rpartition("ANSWER ")[2].splitlines()[0])
    return answer


@pytest.fixture
def real(tree: Any) -> Any:
    if tree.double:
        pytest.skip("the double has no plugin loader")
    return tree


def test_importing_fastdeploy_puts_the_fix_in_place_and_arms_the_one_for_xpu(real: Any, tmp_path: Path) -> None:
    """Catches a group that is loaded in some processes only, and sites missed because the package is half imported."""
    found = outcomes(imported(real, tmp_path, FD_PLUGINS="kvmend"))
    assert found == {"fastdeploy-prefill-cache": "applied", "fastdeploy-xpu-kv-cache": "armed"}
    logs = "".join(path.read_text(errors="replace") for path in (tmp_path / "log").rglob("*.log"))
    assert logs.count("kvmend: fastdeploy-prefill-cache applied") == 1, "one line, in FastDeploy's own log"


@pytest.mark.parametrize("plugins", ["none", "kvmend"])
def test_the_startup_hook_brings_the_fixes_in_without_plugins_and_once_with_them(
    real: Any, tmp_path: Path, plugins: str
) -> None:
    """Catches sites that a hook after the package's own import misses, and fixes that two ways in apply twice."""
    hook = "from kvmend.startup import watch\nwatch('fastdeploy')\n"
    done = imported(real, tmp_path, hook + _IMPORT, FD_PLUGINS=plugins)
    assert outcomes(done) == {"fastdeploy-prefill-cache": "applied", "fastdeploy-xpu-kv-cache": "armed"}
    logs = "".join(path.read_text(errors="replace") for path in (tmp_path / "log").rglob("*.log"))
    assert logs.count("kvmend: fastdeploy-prefill-cache applied") == 1


def test_strict_stops_the_process_through_fastdeploys_own_loader(real: Any, tmp_path: Path) -> None:
    """Catches a strict error that the loader swallows: the server would come up half mended."""
    switch = {"KVMEND_STRICT": "1", "KVMEND_FASTDEPLOY_PREFILL_CACHE": "yes"}
    done = imported(real, tmp_path, FD_PLUGINS="kvmend", **switch)
    assert done.returncode != 0
    assert "KVMEND_FASTDEPLOY_PREFILL_CACHE='yes' is not allowed" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("value", [None, "", "kvmended", "other, kvmend", "kvmend", "other,kvmend"])
def test_check_says_exactly_when_the_loader_would_leave_kvmend_out(
    real: Any, tmp_path: Path, value: str | None
) -> None:
    """Catches an advice that does not follow the loader of this very release."""
    environment = {} if value is None else {"FD_PLUGINS": value}
    installation = locate_path(FASTDEPLOY, real.path)
    assert installation is not None
    assert FASTDEPLOY.unloadable is not None
    said = FASTDEPLOY.unloadable(environment, installation)
    loaded = bool(outcomes(imported(real, tmp_path, **environment)))
    assert loaded is not bool(said), said
