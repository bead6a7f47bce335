"""What a spawned child of a test does; importable, because spawning sends names and not code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def load_and_report(place: str) -> None:
    """Loads the plugin as the framework's loader would in a new process, and writes this process's report."""
    from kvmend import loading, report

    loading.apply_all("toyfw")
    import toyfw.engine  # type: ignore[import-not-found]

    toyfw.engine.Engine().lookup("a")
    snapshot: dict[str, Any] = report.snapshot()
    Path(place).write_text(json.dumps(snapshot), encoding="utf-8")


def load_and_count() -> None:
    """What the child of a server does: loads the plugin, unless it was forked with it, and serves one request."""
    from kvmend import loading

    loading.load("toyfw")
    import toyfw.engine  # type: ignore[import-not-found]

    toyfw.engine.Engine().lookup("a")
