"""Counters that prove a fix was exercised.

They are plain integers on an object, so that bumping one inside `schedule()` costs an attribute store and
nothing else: no lock, no I/O, no allocation beyond the integer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any


class Counters:
    """A fixed set of integers, read and bumped as attributes.

    A number that follows from others need not be counted on a hot path: see `derive`.

    Args:
        names: What is counted.
        may_fall: Derived numbers that are no running totals. The others are never told lower than before, though what
            they are made of does not move at one moment: whoever scrapes a counter that falls takes it for a restart.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> int: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, names: Iterable[str] = (), may_fall: Iterable[str] = ()) -> None:
        # By setattr, and nowhere here is `__dict__` asked for: CPython then keeps the integers in the object itself.
        # Once somebody has seen the dictionary of it, bumping a counter takes 110 ns instead of 25.
        self._names = tuple(names)
        self._derived: dict[str, Callable[[Mapping[str, int]], int]] = {}
        self._before_reset: dict[str, int] = {}
        self._may_fall = frozenset(may_fall)
        self._told: dict[str, int] = {}
        for name in self._names:
            setattr(self, name, 0)

    def derive(self, name: str, value: Callable[[Mapping[str, int]], int]) -> None:
        """Has a counter computed whenever somebody reads the report, instead of bumped.

        Args:
            name: One of the declared counters.
            value: Gives its value, from those of the others at the same moment: counters that are bumped, and those
                that were derived before it. Called outside hot paths.
        """
        self._derived[name] = value

    def as_dict(self) -> dict[str, int]:
        """Name to value, in the order of declaration."""
        values = self._values()
        for name in self._derived:
            value = values[name] - self._before_reset.get(name, 0)
            values[name] = self._told[name] = max(0 if name in self._may_fall else self._told.get(name, 0), value)
        return {name: max(0, value) for name, value in values.items()}

    def _values(self) -> dict[str, int]:
        values = {name: getattr(self, name) for name in self._names}
        for name, compute in self._derived.items():
            # What a fix's function does wrong costs its number, not the report.
            with contextlib.suppress(Exception):
                values[name] = compute(values)
        return values

    def reset(self) -> None:
        """Back to zero, in place; used in a forked child, which counts for itself."""
        for name in self._names:
            setattr(self, name, 0)
        values = self._values()
        self._told = {}
        self._before_reset = {name: values[name] for name in self._derived}
