"""KVMEND_STRICT=1 on the real engine: what cannot be mended does not come up, and the last line says why."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engines import FIX, refusal

pytestmark = pytest.mark.engine

TRANSPORTS = ("offline", "http")
SAYS = f"kvmend.errors.StrictError: KVMEND_STRICT=1: {FIX} is "


def last_lines(folder: Path, *, plugins: Mapping[str, str] | None = None, **variables: str) -> list[str]:
    """The last line of an engine offline and of a server, both of which must end by themselves."""

    def last(transport: str) -> str:
        given = {"KVMEND_STRICT": "1", **variables}
        return refusal(folder / transport, transport=transport, plugins=plugins, variables=given)[-1]

    with ThreadPoolExecutor(max_workers=2) as pool:
        return list(pool.map(last, TRANSPORTS))


def vllm_of_an_unknown_source(folder: Path) -> None:
    """A package `vllm` whose files are the installed ones, but for a lookup with one more statement in it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    changed = Path("v1/core/kv_cache_manager.py")
    for parent in [*reversed(changed.parents)]:
        (folder / "vllm" / parent).mkdir(parents=True)
        for entry in (installed / parent).iterdir():
            if entry.relative_to(installed) not in (changed, *changed.parents) and entry.name != "__pycache__":
                (folder / "vllm" / parent / entry.name).symlink_to(entry)
    tree = ast.parse((installed / changed).read_text(encoding="utf-8"))
    (lookup,) = [node for node in ast.walk(tree) if getattr(node, "name", "") == "get_computed_blocks"]
    lookup.body.append(ast.parse("looked_up = True").body[0])  # type: ignore[attr-defined]
    (folder / "vllm" / changed).write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")


def test_an_unknown_source_does_not_come_up(tmp_path: Path) -> None:
    """Catches a server that runs unmended although it was told to be strict."""
    for transport in TRANSPORTS:
        vllm_of_an_unknown_source(tmp_path / transport)
    for last in last_lines(tmp_path):
        assert last.startswith(f"{SAYS}unknown_source: "), last


def test_a_conflicting_plugin_does_not_come_up(tmp_path: Path) -> None:
    """Catches a server that runs with half of the fix, beneath a lookup that never reaches it."""
    plugins = {"another": "engine_plugins:lookup_of_its_own"}
    for last in last_lines(tmp_path, plugins=plugins):
        assert last.startswith(f"{SAYS}conflict: "), last
        assert "engine_plugins" in last


def test_a_switch_with_a_value_that_is_none_does_not_come_up(tmp_path: Path) -> None:
    """Catches a misspelt value that is taken for a yes or a no."""
    for last in last_lines(tmp_path, KVMEND_VLLM_PREFIX_STATS="perhaps"):
        assert last.startswith(f"{SAYS}failed: KVMEND_VLLM_PREFIX_STATS='perhaps' is not allowed"), last
