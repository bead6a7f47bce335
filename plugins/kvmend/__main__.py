"""`python -m kvmend`."""

from __future__ import annotations

from kvmend.cli import main

main()
