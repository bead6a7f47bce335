"""Which scheduler makes a manager, and what a fix puts on managers."""

from __future__ import annotations

import weakref
from types import FrameType
from typing import Any

from kvmend.api import Context


def scheduler_above(frame: FrameType | None) -> type | None:
    """The class of the scheduler that is making a manager.

    Known from the calls under way: a scheduler may be no subclass of vLLM's, and a subclass may make a second manager
    when vLLM's own constructor is through.
    """
    while frame is not None:
        kind = type(frame.f_locals.get("self"))
        if callable(getattr(kind, "schedule", None)) and callable(getattr(kind, "update_from_output", None)):
            return kind
        frame = frame.f_back
    return None


def package_of(function: Any) -> str:
    """The top-level package that a function is written in; empty for what is no function of Python's."""
    name: str = getattr(function, "__globals__", {}).get("__name__", "")
    return name.partition(".")[0]


class Helped:
    """Managers that a fix has left something on; they lose it when the fix is taken off."""

    def __init__(self, context: Context) -> None:
        self._managers: list[weakref.ref[Any]] = []
        context.on_removal.append(self._take_back)

    def give(self, manager: Any, methods: dict[str, Any]) -> None:
        """Puts methods, by name, over those of the manager's class."""
        # By setattr, and never asking for `__dict__`: CPython then keeps the attributes in the object itself.
        for name, method in methods.items():
            setattr(manager, name, method)
        manager._kvmend_methods = methods
        self._managers = [each for each in self._managers if each() is not None]
        self._managers.append(weakref.ref(manager))

    def _take_back(self) -> None:
        for manager in [each for reference in self._managers if (each := reference()) is not None]:
            there = vars(manager)
            for name, method in there.get("_kvmend_methods", {}).items():
                if there.get(name) is method:
                    delattr(manager, name)
            for name in [name for name in there if name.startswith("_kvmend_")]:
                delattr(manager, name)


def helped_by(context: Context) -> Helped:
    """The one that all wrappers of an application share."""
    if "helped" not in context.shared:
        context.shared["helped"] = Helped(context)
    helped: Helped = context.shared["helped"]
    return helped
