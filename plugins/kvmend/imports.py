"""Tells when the import of a module has ended; for finders on `sys.meta_path`.

Not `wrapt.register_post_import_hook`: importing wrapt takes longer than all that is done with it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Ended = Callable[[ModuleType], None]
_FINDING: set[tuple[int, int, str]] = set()


def found(asking: Any, name: str, path: Any, target: Any, ended: Ended) -> ModuleSpec | None:
    """What the other finders find, with a loader that tells when the module's import has ended.

    Args:
        asking: The finder that asks.
        name: A module that it watches.
        path: As it was given to the finder.
        target: As it was given to the finder.
        ended: Called with the module; what it raises, the import raises.
    """
    # The finders of others ask everybody in turn, this one again too.
    if (key := (threading.get_ident(), id(asking), name)) in _FINDING:
        return None
    _FINDING.add(key)
    try:
        finders: Iterable[Any] = sys.meta_path
        for finder in finders:
            find = None if finder is asking else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                # Looking for a module is not importing it: only a loader that runs says that it is wanted.
                if spec.origin is not None and hasattr(spec.loader, "__dict__"):
                    _tell(spec.loader, name, ended)
                return spec
    finally:
        _FINDING.discard(key)
    return None


def _tell(loader: Any, name: str, ended: Ended) -> None:
    """Has the loader's next `exec_module` of the module call `ended` after it."""
    own = vars(loader)
    run, before = loader.exec_module, own.get("exec_module")

    def exec_module(module: ModuleType) -> None:
        # A loader can serve several modules, as those of zip archives do: it is itself again before anything runs.
        if own.get("exec_module") is exec_module:
            del own["exec_module"]
            if before is not None:
                own["exec_module"] = before
        run(module)
        if module.__name__ == name:
            ended(module)

    own["exec_module"] = exec_module
