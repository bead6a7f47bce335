"""How commands print: wrapped for a terminal, one line a paragraph for whatever reads a pipe or a file.

Imported when there is something to print for people: rich takes longer than most answers.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

#: Columns of what is no terminal: wide enough that nothing is ever wrapped.
_UNWRAPPED = 1_000_000
#: Narrower than this no terminal is taken to be: some report 0 columns.
_NARROWEST = 20


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Later releases of rich would end the process here, with a code of their own."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def console() -> Console:
    """The console of standard output."""
    width = max(shutil.get_terminal_size().columns, _NARROWEST) if _terminal() else _UNWRAPPED
    return _Console(highlight=False, width=width)


def _terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def paragraph(out: Console, text: str | Text, *, indent: int = 2) -> None:
    """Prints a paragraph, set in by some columns."""
    text = Text(text) if isinstance(text, str) else text
    if _terminal():
        out.print(Padding(text, (0, 0, 0, indent), expand=False))
    else:
        out.print(Text(" " * indent) + text)


def table(out: Console, rows: Table) -> None:
    """Prints a table; without the blanks at line ends that only a terminal would not show."""
    if _terminal():
        out.print(rows)
        return
    with out.capture() as captured:
        out.print(rows)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
