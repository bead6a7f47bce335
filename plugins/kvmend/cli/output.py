"""The end of what commands print: whoever reads it may stop early."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

from kvmend.errors import UsageError


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Whoever reads our output may stop early (`| head -1`): no error, and the exit code stays what it is."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO):
            raise
        # What is still in the buffer would be written, and complained about, when the interpreter ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        if error.errno != errno.EPIPE:
            raise UsageError(f"standard output cannot be written: {error.strerror}") from error
