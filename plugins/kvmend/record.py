"""Records: frozen dataclasses whose methods are shared, not generated.

`dataclasses` writes and compiles the methods of each frozen class anew, 1.5 ms a class in every process of a server.
A record is a dataclass to everybody (`dataclasses.replace`, `fields`, `asdict`, a type checker) and costs a tenth of
that; making one takes microseconds longer.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

__all__ = ["record"]

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(*, frozen, kw_only):
        """Makes a class a record; only frozen ones that take keywords alone are to be had."""
        assert (frozen, kw_only) == (True, True)
        return _made


def _made(cls: type) -> type:
    for method in (__init__, __setattr__, __delattr__, __eq__, __hash__, __repr__):
        setattr(cls, method.__name__, method)
    return dataclasses.dataclass(init=False, repr=False, eq=False, match_args=False)(cls)


def __init__(self: Any, **values: Any) -> None:
    own, missing = vars(self), []
    for name, field in self.__dataclass_fields__.items():
        if name in values:
            own[name] = values.pop(name)
        elif field.default is not dataclasses.MISSING:
            own[name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            own[name] = field.default_factory()
        else:
            missing.append(name)
    if missing or values:
        wrong = f"is not given {', '.join(missing)}" if missing else f"has no {', '.join(values)}"
        raise TypeError(f"{type(self).__qualname__} {wrong}")
    check = getattr(self, "__post_init__", None)
    if check is not None:
        check()


def __setattr__(self: Any, name: str, value: Any) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def __delattr__(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _values(self: Any) -> tuple[Any, ...]:
    own = vars(self)
    return tuple(own[name] for name in self.__dataclass_fields__)


def __eq__(self: Any, other: Any) -> Any:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def __hash__(self: Any) -> int:
    return hash(_values(self))


def __repr__(self: Any) -> str:
    own = vars(self)
    return f"{type(self).__qualname__}({', '.join(f'{name}={own[name]!r}' for name in self.__dataclass_fields__)})"
