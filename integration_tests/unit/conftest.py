"""Fixtures of the unit tests: a toy framework in this process, and a journal that starts and ends empty."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmend.journal import JOURNAL
from support.toyfix import make_fix, write_table
from support.toyfw import register_fix, write_release


def _forget(*packages: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVMEND")]:
        monkeypatch.delenv(name)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to import from; what was imported from it and what was applied is gone afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    JOURNAL.entries.clear()
    _forget("toyfw", "toytables", "toy_fixes", "toy_others", "broken_fixes", "foreign")


@pytest.fixture
def toyfw(root: Path) -> Any:
    """The toy framework's engine module, imported; no fix yet."""
    write_release(root)
    return importlib.import_module("toyfw.engine")


@pytest.fixture
def toy(root: Path) -> Path:
    """A registered toy fix with a table of known sources; no framework yet."""
    write_table(root, make_fix())
    register_fix(root, 'make_fix(fingerprints="toytables:toy-count.json")')
    return root
