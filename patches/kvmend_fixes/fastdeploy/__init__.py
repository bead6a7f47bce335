"""Fixes for FastDeploy."""

from __future__ import annotations

from kvmend.api import Framework

FASTDEPLOY = Framework(
    name="FastDeploy",
    package="fastdeploy",
    distributions=("fastdeploy-gpu", "fastdeploy-xpu", "fastdeploy", "fastdeploy-cpu"),
    logger="fastdeploy",
    processes="API server, engine, workers and cache transfer processes",
)
