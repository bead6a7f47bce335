"""Which trees the XPU fix is tested on: the doubles of every generation always, real trees where there are any.

Real trees come from KVMEND_FASTDEPLOY_TREES, or lie below ~/.cache/kvmend/fastdeploy. They need an interpreter with
Paddle: this one, or the one that KVMEND_FASTDEPLOY_PYTHON names.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).resolve().parents[1]
for _folder in (_TESTS, Path(__file__).resolve().parent, _TESTS.parent / "plugins", _TESTS.parent / "patches"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

import xputrees  # noqa: E402


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"fastdeploy-xpu-kv-cache was measured on: {', '.join(xputrees.MEASURED) or 'no tree'}")
    if xputrees.LEFT_OUT:
        terminalreporter.write_line(f"fastdeploy-xpu-kv-cache left out {xputrees.LEFT_OUT}")


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Measures a tree in a process of its own, once per session; gives what `xpumeasure` has written."""
    return xputrees.Measurements(tmp_path_factory.mktemp("xpu"))
