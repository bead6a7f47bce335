"""The startup hook: brings the fixes into processes that load no plugins.

`kvmend hook enable` writes a `.pth` file with LINE in it, which every interpreter of an environment runs. Nearly all of
them never import a framework, so the line imports nothing of kvmend's: it holds the finder itself, and a kvmend that is
gone, broken or without byte code costs them what a sound one does. Compiling the finder takes a third of a millisecond;
a module without byte code, however short, takes several, since the first `compile()` of a process makes all classes of
`ast`. This module is imported when a framework is looked for.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: What `site` runs of the `.pth` file, in virtual environments twice; `{names}` stands for the packages. The file stays
#: when kvmend is upgraded: what an older line calls here must go on being here.
LINE = (
    'import os, sys; os.environ.get("KVMEND") == "0" or '
    'any(type(finder).__name__ == "KvmendWatch" for finder in sys.meta_path) or exec("'
    "class KvmendWatch:\\n"
    " packages = ({names},)\\n"
    " def find_spec(self, name, path=None, target=None):\\n"
    "  if name in self.packages:\\n"
    "   try:\\n"
    "    from kvmend.startup import found\\n"
    "   except Exception:\\n"
    "    pass\\n"
    "   else:\\n"
    "    return found(self, name, path, target)\\n"
    'sys.meta_path.insert(0, KvmendWatch())")'
)

_FINDING: set[tuple[int, str]] = set()


def line(packages: Iterable[str]) -> str:
    """The line that loads kvmend's fixes for each of the packages once its import has ended.

    Args:
        packages: Import packages of frameworks.
    """
    return LINE.replace("{names}", ", ".join(map(repr, packages)))


def watch(*packages: str) -> None:
    """Does in this process what the line does at a start."""
    exec(line(packages))


def watched() -> tuple[str, ...]:
    """The packages that are watched in this process."""
    finders: Iterable[Any] = sys.meta_path
    return next((finder.packages for finder in finders if type(finder).__name__ == "KvmendWatch"), ())


def found(asking: Any, name: str, path: Any, target: Any) -> ModuleSpec | None:
    """What the other finders find, with a loader that tells when the package's import has ended.

    Args:
        asking: The finder that asks.
        name: A package that it watches.
        path: As it was given to the finder.
        target: As it was given to the finder.
    """
    # The finders of others ask everybody in turn, this one again too.
    if (key := (threading.get_ident(), name)) in _FINDING:
        return None
    _FINDING.add(key)
    try:
        for finder in sys.meta_path:
            find = None if finder is asking else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                # Looking for a package is not importing it: only a loader that runs says that it is wanted.
                if spec.origin is not None and hasattr(spec.loader, "__dict__"):
                    _tell(spec.loader, name)
                return spec
    finally:
        _FINDING.discard(key)
    return None


def _tell(loader: Any, name: str) -> None:
    """Has the loader's next `exec_module` of the package load the fixes after it."""
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
            _load(name)

    own["exec_module"] = exec_module


def _load(name: str) -> None:
    strict = os.environ.get("KVMEND_STRICT") == "1"
    try:
        from kvmend import loading
    except Exception as error:  # half uninstalled: the server comes up, unless it must not
        if strict:
            raise RuntimeError(f"KVMEND_STRICT=1: kvmend could not be loaded: {error!r}") from error
        logging.getLogger("kvmend").warning("kvmend could not be loaded, its fixes are missing: %r", error)
        return
    loading.load(name)
