"""The tree under test and the fix on it.

In the ordinary run the tree is the double. `test_fd_real_trees.py` runs this same folder once per real tree, in a
process of its own, with KVMEND_FASTDEPLOY_TREE set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).resolve().parents[1]
for _folder in (_TESTS, Path(__file__).resolve().parent, _TESTS.parent / "plugins", _TESTS.parent / "patches"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

import fdtree  # noqa: E402
from pnode import Options, PNode  # noqa: E402

#: A run on one tree is a run of that file already.
collect_ignore = ["test_fd_real_trees.py"] if os.environ.get("KVMEND_FASTDEPLOY_TREE") else []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"fastdeploy-prefill-cache was tested on: {', '.join(fdtree.USED) or 'no tree'}")


@pytest.fixture(scope="package", params=fdtree.wanted(), ids=lambda path: path.name)
def tree(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The classes of the tree under test."""
    with fdtree.loaded(request.param) as loaded:
        yield loaded


@pytest.fixture
def applied(tree: Any) -> Iterator[Any]:
    """The fix in its default mode; gives its counters."""
    with tree.fixed("safe") as counters:
        yield counters


@pytest.fixture
def node(tree: Any) -> Iterator[Callable[..., PNode]]:
    """Makes prefill nodes and cleans up after them."""
    nodes: list[PNode] = []

    def make(**options: Any) -> PNode:
        nodes.append(PNode(tree, Options(**options)))
        return nodes[-1]

    yield make
    for made in nodes:
        made.close()
