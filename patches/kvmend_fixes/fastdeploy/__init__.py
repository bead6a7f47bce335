"""Fixes for FastDeploy."""

from __future__ import annotations

import ast
import logging
from collections.abc import Mapping

from kvmend.api import Framework, Sources, left_out

_LOADER = "fastdeploy.plugins.utils"


def unloadable(environ: Mapping[str, str], sources: Sources) -> tuple[str, ...]:
    """`FD_PLUGINS` unset loads everything in 2.3 and nothing from 2.4 on; set, only the names between its commas."""
    value = environ.get("FD_PLUGINS")
    if value is not None:
        reason = left_out("FD_PLUGINS", value)
        return (reason,) if reason else ()
    # Read off the source, as everything: the release that changed it is not the only one that may.
    loader = sources.body(_LOADER, "load_plugins_by_group")
    if loader is None:
        return ("FD_PLUGINS is not set, and what this release then loads cannot be read: set FD_PLUGINS=kvmend",)
    if _loads_all(loader.tree):
        return ()
    return ("FD_PLUGINS is not set, and this release then loads no plugin: set FD_PLUGINS=kvmend",)


def _loads_all(loader: ast.AST) -> bool:
    """Whether the loader takes every plugin where no list is given: it asks for that, and does not return for it."""
    nodes = list(ast.walk(loader))
    returns = any(
        isinstance(node, ast.If) and _asks_for_none(node.test) and isinstance(node.body[-1], ast.Return)
        for node in nodes
    )
    takes = any(
        isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) and any(map(_asks_for_none, node.values))
        for node in nodes
    )
    return takes and not returns


def _asks_for_none(test: ast.expr) -> bool:
    """Whether a condition is `<something> is None`."""
    return (
        isinstance(test, ast.Compare)
        and len(test.ops) == 1
        and isinstance(test.ops[0], ast.Is)
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value is None
    )


def logger() -> str:
    """2.3 - 2.6 write fastdeploy.log through `legacy.fastdeploy`, develop since 2026 through `fastdeploy.main`."""
    new = logging.getLogger("fastdeploy.main")
    return new.name if new.handlers and not new.propagate else "legacy.fastdeploy"


FASTDEPLOY = Framework(
    name="FastDeploy",
    package="fastdeploy",
    distributions=("fastdeploy-gpu", "fastdeploy-xpu", "fastdeploy", "fastdeploy-cpu"),
    logger=logger,
    processes="API server, engine, workers and cache transfer processes",
    unloadable=unloadable,
    plugin_group="fastdeploy.reasoning_parser_plugins",
)
