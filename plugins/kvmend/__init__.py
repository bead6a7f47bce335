"""kvmend repairs pinned serving frameworks in place; see `kvmend --help`.

Importing this package imports nothing else, `__future__` included: with the startup hook it happens in every process.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
