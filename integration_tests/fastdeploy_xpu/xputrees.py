"""The trees under test, and what is known of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from support import xpu_double

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]
#: Trees measured in this session, and why real ones were not, for the summary.
MEASURED: list[str] = []
LEFT_OUT = ""

#: Bytes of KV tensors that one creator makes: 2 layers, keys and values, 100 blocks, 8 heads, 64 tokens, 128, 2 bytes.
ONCE = 2 * 2 * 100 * 8 * 64 * 128 * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a generation of FastDeploy does without kvmend.

    Attributes:
        launch: Launch rule.
        twice: Of the 18 configurations, those with two creators.
        nobody: Of the 18 configurations, those without a creator.
        bare_nobody: Of the 6 without prefix caching (no storage backend there), those without a creator.
        outcome: How the fix ends.
        literal: Of the 18 configurations, those that PR 7420's condition gets wrong here.
        bare_literal: Of the 6 without prefix caching, those that PR 7420's condition gets wrong here.
    """

    launch: str
    twice: int
    nobody: int = 0
    bare_nobody: int = 0
    outcome: str = "applied"
    literal: int
    bare_literal: int = 1


KNOWN = {
    "2.3": Known(launch="never", twice=0, outcome="not_affected", literal=5),
    "2.4": Known(launch="cpu-blocks", twice=3, literal=2),
    "2.5": Known(launch="cpu-blocks-or-storage", twice=5, literal=0),
    "7364-parent": Known(launch="cpu-blocks-or-storage", twice=5, literal=0),
    "7364": Known(launch="cpu-blocks-or-storage", twice=5, literal=0),
    "7420-parent": Known(launch="cpu-blocks-or-storage", twice=5, literal=0),
    "7420": Known(launch="cpu-blocks-or-storage", twice=0, bare_nobody=1, literal=0),
    "2.6": Known(launch="storage", twice=4, literal=1),
    "develop": Known(launch="storage", twice=0, outcome="already_fixed", literal=1),
    "8046": Known(launch="never", twice=0, outcome="not_affected", literal=5),
    "8046-unrepaired": Known(launch="never", twice=0, nobody=4, literal=5),
}

DOUBLES = tuple(xpu_double.TREES)


def known_of(tree: str) -> Known:
    """What is known of a tree, real or double."""
    return KNOWN[tree.removeprefix("like-")]


@cache
def real_trees() -> dict[str, Path]:
    """Real trees that the fix has figures for, by name."""
    named = os.environ.get("KVMEND_FASTDEPLOY_TREES")
    if named is not None:
        found = [Path(part) for part in named.split(os.pathsep) if part]
    else:
        folder = Path("~/.cache/kvmend/fastdeploy").expanduser()
        found = sorted(folder.iterdir()) if folder.is_dir() else []
    trees = {path.name: path for path in found if (path / "fastdeploy" / "__init__.py").is_file()}
    unknown = set(trees) - set(KNOWN)
    assert named is None or not unknown, f"no figures are known for {', '.join(sorted(unknown))}"
    return {name: trees[name] for name in KNOWN if name in trees}


def interpreter() -> str:
    """The Python that imports real trees."""
    return os.environ.get("KVMEND_FASTDEPLOY_PYTHON", sys.executable)


@cache
def measurable() -> dict[str, Path]:
    """Real trees, if there is an interpreter that can import them."""
    global LEFT_OUT
    trees = real_trees()
    probing = [interpreter(), "-c", "import importlib.util as u, sys; sys.exit(not u.find_spec('paddle'))"]
    if trees and subprocess.run(probing, check=False).returncode != 0:
        LEFT_OUT = f"{', '.join(trees)}: {interpreter()} has no Paddle (KVMEND_FASTDEPLOY_PYTHON names one that has)"
        return {}
    return trees


ALL = (*DOUBLES, *measurable())


class Measurements:
    """Runs `xpumeasure` once per tree and keeps what it says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._done: dict[str, dict[str, Any]] = {}

    def __call__(self, tree: str) -> dict[str, Any]:
        if tree not in self._done:
            self._done[tree] = self._measure(tree)
            MEASURED.append(tree)
        return self._done[tree]

    def tree(self, tree: str) -> Path:
        """Folder of a tree; a double is written first."""
        return real_trees().get(tree) or xpu_double.write(self.folder, tree)

    def _measure(self, tree: str) -> dict[str, Any]:
        double = tree in DOUBLES
        answer = self.folder / f"{tree}.json"
        path = self.tree(tree)
        run(
            [sys.executable if double else interpreter(), str(_HERE / "xpumeasure.py"), str(answer)],
            path,
            self.folder,
            KVMEND_TEST_PROBE_ONLY="1" if double else "0",
        )
        measured: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return measured


def run(command: list[str], tree: Path, folder: Path, **environment: str) -> str:
    """Runs a process that imports `fastdeploy` from a tree; gives its standard output."""
    paths = [tree, _ROOT / "plugins", _ROOT / "patches", _HERE.parent, _HERE]
    done = subprocess.run(
        command,
        env={name: value for name, value in os.environ.items() if not name.startswith("KVMEND")}
        | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "FD_LOG_DIR": str(folder / "log"), "FD_PLUGINS": "none"}
        | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout
