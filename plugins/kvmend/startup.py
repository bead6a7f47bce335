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
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from typing import Any

from kvmend import imports

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
    return imports.found(asking, name, path, target, lambda _module: _load(name))


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
