"""A serving framework that fits on a page. Like a real one, it loads the plugins of an entry-point group."""

from importlib.metadata import entry_points


def load_plugins() -> None:
    """Calls every function that is registered under `tinyserve.plugins`."""
    for point in entry_points(group="tinyserve.plugins"):
        point.load()()
