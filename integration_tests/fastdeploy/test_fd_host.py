"""The fix as the host puts it in place: judged by source, every site or none, read back, taken off again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pnode import PNode

from kvmend import applier
from kvmend.locate import locate_path
from kvmend.outcome import Outcome
from kvmend_fixes.fastdeploy.prefill_cache import FIX

PROMPT = list(range(100, 132))
Make = Callable[..., PNode]


def hit(node: PNode) -> int:
    """Tokens that the second of two equal requests finds."""
    node.preallocate("x", PROMPT)
    node.preallocate("y", PROMPT)
    return node.entries["y"].hit


@pytest.fixture
def installed(tree: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tree as the host finds it. The double is no known source, so there the operator has to insist."""
    monkeypatch.delenv("KVMEND", raising=False)
    monkeypatch.setenv(FIX.switch, "force" if tree.double else "1")
    return locate_path(FIX.framework, tree.path)


def test_the_host_applies_the_fix_and_takes_it_off(tree: Any, installed: Any, node: Make) -> None:
    """Catches a record the host refuses: a site that is not there, a source in no table, a wrapper read as foreign."""
    before = hit(node())
    result = applier.apply(FIX, installation=installed)
    try:
        assert (result.outcome, result.mode) == (Outcome.APPLIED, "safe"), result.reason
        assert tree.double or tree.name in result.known_as
        assert hit(node()) == 32
    finally:
        removed = applier.remove(FIX.id)
    assert removed is not None
    assert removed.outcome is Outcome.DISABLED
    assert hit(node()) == before


def test_eager_mode_is_not_needed_where_upstream_publishes_and_guards(
    tree: Any, installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an eager mode that wraps for nothing, or says that it did."""
    if tree.double:
        pytest.skip("the double is no known source, and `force` means the default mode")
    monkeypatch.setenv(FIX.switch, "eager")
    result = applier.apply(FIX, installation=installed)
    applier.remove(FIX.id)
    needed = "no-guard" in tree.finding.features
    assert result.outcome is (Outcome.APPLIED if needed else Outcome.NOT_AFFECTED)


def test_an_unknown_source_is_left_alone_unless_forced(
    tree: Any, installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a fix without a table of known sources: its probe alone would let it touch anything that looks alike."""
    if not tree.double:
        pytest.skip(f"{tree.name} is a known source")
    monkeypatch.setenv(FIX.switch, "1")
    result = applier.apply(FIX, installation=installed)
    applier.remove(FIX.id)
    assert result.outcome is Outcome.UNKNOWN_SOURCE
