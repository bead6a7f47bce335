"""A pytest plugin, `-p support.pytest_kvmend`: applies kvmend in the test process.

Upstream's unit tests build schedulers directly and never run vLLM's plugin loader, so somebody else must.
With KVMEND=0 in the environment everything is `disabled` and the run is the one without.
"""

from __future__ import annotations

from kvmend.loading import apply_all


def pytest_configure() -> None:
    apply_all()
