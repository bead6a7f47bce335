"""A fix for tinyserve, and the plugin that puts it in place."""


def load() -> None:
    """Entry point of the group `tinyserve.plugins`: applies every registered fix for tinyserve."""
    from kvmend.loading import apply_all

    apply_all("tinyserve")
