"""The startup hook: brings the fixes into processes that load no plugins.

`kvmend hook enable` writes a `.pth` file that imports this module in every interpreter of an environment. Nearly all
of them never import a framework, so nothing is imported here; the work begins after a framework's own import.
"""

import _thread
import os
import sys

# Annotations are strings, and this is no import: `typing` and `__future__` would cost more than all of this module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


def watch(*packages: str) -> None:
    """Loads kvmend's fixes for each of the packages once its import has ended.

    Args:
        packages: Import packages of frameworks.
    """
    if os.environ.get("KVMEND") != "0" and not watched():
        sys.meta_path.insert(0, _Watch(packages))


def watched() -> tuple[str, ...]:
    """The packages that are watched in this process."""
    return next((finder.packages for finder in sys.meta_path if isinstance(finder, _Watch)), ())


class _Watch:
    """A finder that leaves finding to the others and has the loader tell when a framework's import has ended."""

    def __init__(self, packages: "Iterable[str]") -> None:
        self.packages = tuple(packages)
        self._finding: set[tuple[int, str]] = set()

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        # The finders of others ask everybody in turn, this one again too.
        if name not in self.packages or (key := (_thread.get_ident(), name)) in self._finding:
            return None
        self._finding.add(key)
        try:
            for finder in sys.meta_path:
                find = None if finder is self else getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = find(name, path, target) if find is not None else None
                if spec is not None:
                    # Looking for a package is not importing it: only a loader that runs says that it is wanted.
                    if spec.origin is not None and hasattr(spec.loader, "__dict__"):
                        _tell(spec.loader, name)
                    return spec
        finally:
            self._finding.discard(key)
        return None


def _tell(loader: "Any", name: str) -> None:
    """Has the loader's next `exec_module` of the package load the fixes after it."""
    own = vars(loader)
    run, before = loader.exec_module, own.get("exec_module")

    def exec_module(module: "ModuleType") -> None:
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
    except Exception as error:  # half uninstalled, or without wrapt: the server comes up, unless it must not
        if strict:
            raise RuntimeError(f"KVMEND_STRICT=1: kvmend could not be loaded: {error!r}") from error
        import logging

        logging.getLogger("kvmend").warning("kvmend could not be loaded, its fixes are missing: %r", error)
        return
    loading.load(name)
