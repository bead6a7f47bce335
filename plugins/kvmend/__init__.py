"""kvmend repairs pinned serving frameworks in place; see `kvmend --help`.

Importing this package imports nothing else.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
