"""Counters that prove a fix was exercised.

They are plain integers on an object, so that bumping one inside `schedule()` costs an attribute store and
nothing else: no lock, no I/O, no allocation beyond the integer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING


class Counters:
    """A fixed set of integers, read and bumped as attributes.

    A number that follows from others need not be counted on a hot path: see `derive`.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> int: ...

        def __setattr__(self, name: str, value: int) -> None: ...

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.__dict__["_derived"] = {}
        for name in names:
            self.__dict__[name] = 0

    def derive(self, name: str, value: Callable[[], int]) -> None:
        """Has a counter computed whenever somebody reads the report, instead of bumped.

        Args:
            name: One of the declared counters.
            value: Gives its value; called outside hot paths.
        """
        self.__dict__["_derived"][name] = value

    def as_dict(self) -> dict[str, int]:
        """Name to value, in the order of declaration."""
        derived = self.__dict__["_derived"]
        values = {name: value for name, value in self.__dict__.items() if name != "_derived"}
        for name, compute in derived.items():
            # What a fix's function does wrong costs its number, not the report.
            with contextlib.suppress(Exception):
                values[name] = max(0, compute())  # its parts are not read at one moment
        return values

    def derived(self) -> tuple[str, ...]:
        """Names of the computed ones: these may fall, the others only rise."""
        return tuple(self.__dict__["_derived"])

    def reset(self) -> None:
        """Back to zero, in place; used in a forked child, which counts for itself."""
        for name in self.__dict__:
            if name != "_derived":
                self.__dict__[name] = 0
