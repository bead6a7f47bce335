"""Counters that prove a fix was exercised.

They are plain integers on an object, so that bumping one inside `schedule()` costs an attribute store and
nothing else: no lock, no I/O, no allocation beyond the integer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any


class Counters:
    """A fixed set of integers, read and bumped as attributes.

    A number that follows from others need not be counted on a hot path: see `derive`.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> int: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, names: Iterable[str] = ()) -> None:
        # By setattr, and nowhere here is `__dict__` asked for: CPython then keeps the integers in the object itself.
        # Once somebody has seen the dictionary of it, bumping a counter takes 110 ns instead of 25.
        self._names = tuple(names)
        self._derived: dict[str, Callable[[], int]] = {}
        self._before_reset: dict[str, int] = {}
        for name in self._names:
            setattr(self, name, 0)

    def derive(self, name: str, value: Callable[[], int]) -> None:
        """Has a counter computed whenever somebody reads the report, instead of bumped.

        Args:
            name: One of the declared counters.
            value: Gives its value; called outside hot paths.
        """
        self._derived[name] = value

    def as_dict(self) -> dict[str, int]:
        """Name to value, in the order of declaration."""
        values = {name: getattr(self, name) for name in self._names}
        for name, compute in self._derived.items():
            # What a fix's function does wrong costs its number, not the report.
            with contextlib.suppress(Exception):
                values[name] = max(0, compute() - self._before_reset.get(name, 0))  # parts are not read at one moment
        return values

    def reset(self) -> None:
        """Back to zero, in place; used in a forked child, which counts for itself."""
        for name in self._names:
            setattr(self, name, 0)
        for name, compute in self._derived.items():
            with contextlib.suppress(Exception):
                self._before_reset[name] = compute()
