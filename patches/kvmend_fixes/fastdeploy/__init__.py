"""Fixes for FastDeploy."""

from __future__ import annotations

import ast
import logging
import os
from collections.abc import Mapping, Sequence

from kvmend.api import Framework, Role, Sources, left_out

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


_SCRIPTS = {
    "worker_process.py": "worker",
    "cache_transfer_manager.py": "transfer manager",
    "cache_messager.py": "messager",
    "api_server.py": "API server",
    "multi_api_server.py": "API server",
}


def role(command: Sequence[str], environ: Mapping[str, str], name: str) -> Role:
    """Workers and cache processes are scripts of their own; an engine beside the API server is a child of it.

    Without such a child the API server's process is the engine too. The node is the option `--splitwise-role`, with
    `_` or `-`, that every one of these commands has; without it the default, mixed.
    """
    script = os.path.basename(command[0]) if command else ""
    kind = _SCRIPTS.get(script, "main process")
    if name.startswith(("Process-", "ForkProcess-", "SpawnProcess-")):
        kind = "engine"
    options = _options(command)
    rank = options.get("rank", environ.get("PADDLE_TRAINER_ID", "") if kind == "worker" else "")
    node = options.get("splitwise-role", "mixed")
    return Role(
        name=kind,
        rank=int(rank) if rank.isdecimal() else None,
        node=node if node in ("prefill", "decode", "mixed") else "",
    )


def _options(command: Sequence[str]) -> dict[str, str]:
    """Option to value, for `--name value` and `--name=value` with `_` read as `-`."""
    found = {}
    for index, word in enumerate(command):
        if word.startswith("--"):
            option, equals, value = word[2:].partition("=")
            following = command[index + 1] if index + 1 < len(command) else ""
            found[option.replace("_", "-")] = value if equals else following
    return found


FASTDEPLOY = Framework(
    name="FastDeploy",
    package="fastdeploy",
    distributions=("fastdeploy-gpu", "fastdeploy-xpu", "fastdeploy", "fastdeploy-cpu"),
    logger=logger,
    processes="API server, engine, workers and cache transfer processes",
    unloadable=unloadable,
    plugin_group="fastdeploy.reasoning_parser_plugins",
    plugin_list="FD_PLUGINS",
    role=role,
)
