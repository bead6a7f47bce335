"""The objects at a site: who is there now, and can ours go over it."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from kvmend.fix import Site

#: Set on every object that kvmend puts in place, so that a second copy of kvmend knows it too.
MARK = "__kvmend__"
_MISSING = object()
#: A replacement that calls more functions than this before the original is taken not to call it.
_MOST_LAYERS = 256


def module_of(site: Site) -> ModuleType | None:
    """The site's module if it is imported, complete or not."""
    return sys.modules.get(site.module)


def parent_of(site: Site) -> Any | None:
    """The module or class that holds the site, or None while it does not exist (yet)."""
    holder: Any = module_of(site)
    for name in site.qualname.split(".")[:-1]:
        holder = vars(holder).get(name) if holder is not None else None
    return holder


def raw_at(site: Site) -> Any | None:
    """What the holder's own dictionary has under the site's name (a static or class method undisguised), or None."""
    holder = parent_of(site)
    found = vars(holder).get(site.qualname.rpartition(".")[2], _MISSING) if holder is not None else _MISSING
    return None if found is _MISSING else found


def function_of(raw: Any) -> Callable[..., Any]:
    """The function inside a static or class method; anything else as it is."""
    function: Callable[..., Any] = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
    return function


def like(raw: Any, function: Callable[..., Any]) -> Any:
    """The function in the same kind of wrapping as what it replaces."""
    return type(raw)(function) if isinstance(raw, (staticmethod, classmethod)) else function


def is_original(function: Any, site: Site) -> bool:
    """Whether this is the function that the module's own source defines under the site's name."""
    file = getattr(module_of(site), "__file__", None)
    return (
        isinstance(function, FunctionType)
        and function.__code__.co_name == site.qualname.rpartition(".")[2]
        and file is not None
        and same_file(function.__code__.co_filename, file)
        and not hasattr(function, "__wrapped__")
    )


def same_file(one: str, other: str) -> bool:
    """Whether two paths lead to one file."""
    return one == other or os.path.realpath(one) == os.path.realpath(other)


def layers(function: Any) -> Iterator[Any]:
    """The function and everything it visibly calls through to: `__wrapped__`, closure cells, globals, defaults.

    A plugin that replaces a method keeps the old one in one of these places; what is in none of them is not
    called, as far as anyone can tell.
    """
    pending: list[Any] = [function]
    seen: set[int] = set()
    while pending and len(seen) < _MOST_LAYERS:
        current = pending.pop(0)
        if id(current) in seen or not callable(current):
            continue
        seen.add(id(current))
        yield current
        pending.extend(kept for name in ("__wrapped__", "func") if (kept := getattr(current, name, None)) is not None)
        if isinstance(current, FunctionType):
            for cell in current.__closure__ or ():
                try:
                    pending.append(function_of(cell.cell_contents))
                except ValueError:
                    continue
            pending.extend(current.__defaults__ or ())
            pending.extend((current.__kwdefaults__ or {}).values())
            for name in current.__code__.co_names:
                kept = current.__globals__.get(name)
                if isinstance(kept, FunctionType):
                    pending.append(kept)


def reached(owner: type, name: str) -> Iterator[tuple[Any, frozenset[str]]]:
    """What calling a method visibly runs, each with the names in its code.

    Visible are the method itself with its `layers`, what it calls on the same object, and what these call further
    up the line of classes, by `super()` or by the name of a class. Everything a name might mean is taken for meant.

    Args:
        owner: Class of the object.
        name: Name of the method.
    """
    line = [vars(each) for each in owner.__mro__]
    pending = [(0, name)]
    seen: set[tuple[int, str]] = set()
    functions: dict[int, Any] = {}
    while pending:
        start, wanted = pending.pop(0)
        place = next((index for index in range(start, len(line)) if wanted in line[index]), None)
        if place is None or (place, wanted) in seen or len(seen) > _MOST_LAYERS:
            continue
        seen.add((place, wanted))
        above = owner.__mro__[place + 1 :]
        for layer in layers(function_of(line[place][wanted])):
            if id(layer) in functions:
                continue
            functions[id(layer)] = layer
            names = _names_in(layer.__code__) if isinstance(layer, FunctionType) else frozenset[str]()
            yield layer, names
            called = sorted(each for each in names if any(each in members for members in line))
            pending.extend((0, each) for each in called if each != wanted)
            if "super" in names or _names_one_of(above, layer, names):
                pending.extend((place + 1, each) for each in called)


def _names_one_of(classes: tuple[type, ...], function: Any, names: frozenset[str]) -> bool:
    """Whether a function names one of some classes, by its own name or by one that the function's module gives it."""
    known = getattr(function, "__globals__", {})
    return any(each.__name__ in names or any(known.get(name) is each for name in names) for each in classes)


def _names_in(code: CodeType) -> frozenset[str]:
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset((*code.co_names, *code.co_freevars)).union(*inner)


def bypass(owner: type, name: str, wrapper: Any) -> str:
    """Who is called instead of a wrapper when a class's method is called; empty if the wrapper is."""
    holder = next((each for each in owner.__mro__ if name in vars(each)), None)
    if holder is None or any(layer is wrapper for layer in layers(function_of(vars(holder)[name]))):
        return ""
    if any(function is wrapper for function, _ in reached(owner, name)):
        return ""
    return describe(vars(holder)[name])


def describe(function: Any) -> str:
    """`module.qualname` of whoever is in place, for messages."""
    function = function_of(function)
    name = getattr(function, "__qualname__", type(function).__name__)
    if isinstance(function, FunctionType) and hasattr(function, "__wrapped__"):
        # functools.wraps gives the wrapper the name of what it wraps; its code says where it comes from.
        code = function.__code__
        return f"{code.co_filename}:{code.co_firstlineno} ({function.__globals__.get('__name__', '?')})"
    return f"{getattr(function, '__module__', None) or '?'}.{name}"


def still_running(site: Site) -> bool:
    """Whether the site's module is half imported: in `sys.modules`, its body not at its end."""
    spec = getattr(module_of(site), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def loaded_from(site: Site) -> str | None:
    """The file the site's module was loaded from; None while it is not imported."""
    module = module_of(site)
    return inspect.getfile(module) if module is not None and getattr(module, "__file__", None) else None
