"""Fixes for FastDeploy."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvmend.api import Framework, Sources

_LOADER = "fastdeploy.plugins.utils"


def unloadable(environ: Mapping[str, str], sources: Sources) -> tuple[str, ...]:
    """`FD_PLUGINS` unset loads everything in 2.3 and nothing from 2.4 on; names are split on commas, spaces and all."""
    value = environ.get("FD_PLUGINS")
    if value is None:
        loader = sources.body(_LOADER, "load_plugins_by_group")
        # Read off the source, as everything: the release that changed it is not the only one that may.
        loads_all = loader is not None and "allowed_plugins is None or" in loader.text
        return () if loads_all else ("FD_PLUGINS is not set, and this release then loads no plugin: set it to kvmend",)
    names = value.split(",")
    if "kvmend" in names:
        return ()
    hint = " (spaces are not stripped)" if "kvmend" in map(str.strip, names) else ""
    return (f"FD_PLUGINS={value!r} does not name kvmend{hint}: it will not be loaded",)


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
)
