"""Counters that prove a fix was exercised.

They are plain integers on an object, so that bumping one inside `schedule()` costs an attribute store and
nothing else: no lock, no I/O, no allocation beyond the integer.
"""

from __future__ import annotations

from collections.abc import Iterable


class Counters:
    """A fixed set of integers, read and bumped as attributes."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        for name in names:
            setattr(self, name, 0)

    def __getattr__(self, name: str) -> int:
        raise AttributeError(f"no counter {name!r}")

    def __setattr__(self, name: str, value: int) -> None:
        object.__setattr__(self, name, value)

    def as_dict(self) -> dict[str, int]:
        """Name to value, in the order of declaration."""
        return dict(self.__dict__)

    def reset(self) -> None:
        """Back to zero, in place; used in a forked child, which counts for itself."""
        for name in self.__dict__:
            self.__dict__[name] = 0
