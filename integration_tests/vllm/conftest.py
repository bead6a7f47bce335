"""Real vLLM schedulers of the installed release, with kvmend in force, and the same tests without it.

In the ordinary run the fix is applied (or the release needs none) and every test must pass. With
KVMEND_VLLM_PREFIX_STATS=0 the same tests meet vLLM as released: on an affected release each test marked
`shows_fault` must then fail, because of a wrong count, and every other one must still pass.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).resolve().parents[1]
if str(_TESTS) not in sys.path:
    sys.path.append(str(_TESTS))

FIX = "vllm-prefix-stats"
_SEEN: list[str] = []
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def unmended() -> bool:
    """Whether this is the run that shows the fault."""
    return os.environ.get("KVMEND_VLLM_PREFIX_STATS") == "0"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "shows_fault: must fail on an affected release without the fix")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not unmended() or not any("engine" not in item.keywords for item in items):
        return
    from runs import Miscounted
    from vllm_release import NATIVELY_FIXED

    if NATIVELY_FIXED:
        return
    for item in items:
        if item.get_closest_marker("shows_fault"):
            item.add_marker(pytest.mark.xfail(strict=True, raises=Miscounted, reason="vLLM as released"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _SEEN:
        terminalreporter.write_line(_SEEN[0])


@pytest.fixture(scope="session")
def outcome() -> str:
    """Applies kvmend in this process, as vLLM's plugin loader would, and says how that ended."""
    from kvmend.loading import apply_all
    from vllm_release import NATIVELY_FIXED, VERSION

    (result,) = [each for each in apply_all("vllm") if each.fix == FIX]
    _SEEN.append(f"{FIX} is {result.outcome} on vLLM {VERSION}")
    wanted = "disabled" if unmended() else "already_fixed" if NATIVELY_FIXED else "applied"
    assert str(result.outcome) == wanted, result.reason
    return wanted


@pytest.fixture
def run(outcome: str) -> Callable[..., Any]:
    """Makes a `Run`: a scheduler of the installed release and what it has counted so far."""
    from runs import Run

    return Run
