"""Makes `support` importable for every suite below."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

_HERE = str(Path(__file__).resolve().parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts us in the background makes us, and all that the tests start, ignore SIGINT.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "slow: installs or builds something; ten seconds where nothing is cached")
