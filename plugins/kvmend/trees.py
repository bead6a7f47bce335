"""Places that hold packages: a folder, a wheel; and the text of what is read there."""

from __future__ import annotations

import codecs
import zipfile
import zlib
from pathlib import Path
from typing import Protocol

from kvmend.errors import LocateError
from kvmend.record import record


class Tree(Protocol):
    """A place that holds packages."""

    def read(self, relative: str) -> bytes | None:
        """Content of a file by its path below the place, or None if it is not there.

        Raises:
            LocateError: It is there and cannot be read; the message names file and cause.
        """

    def where(self, relative: str) -> str:
        """How the user would name that file."""


@record(frozen=True, kw_only=True)
class FolderTree:
    """A folder that holds packages, as one on `sys.path` does."""

    root: Path

    def read(self, relative: str) -> bytes | None:
        """See `Tree.read`."""
        try:
            return (self.root / relative).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise LocateError(f"{self.where(relative)} cannot be read: {_cause(error)}") from error

    def where(self, relative: str) -> str:
        """See `Tree.where`."""
        return str(self.root / relative)


@record(frozen=True, kw_only=True)
class WheelTree:
    """A wheel, read in place."""

    path: Path

    def read(self, relative: str) -> bytes | None:
        """See `Tree.read`."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                return archive.read(relative)
        except KeyError:
            return None
        except (OSError, zipfile.BadZipFile, zlib.error) as error:
            raise LocateError(f"{self.where(relative)} cannot be read: {_cause(error)}") from error

    def where(self, relative: str) -> str:
        """See `Tree.where`."""
        return f"{self.path}!/{relative}"


def _cause(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def decoded(content: bytes, where: str) -> str:
    """Text of a file, with the line ends of Python.

    Raises:
        LocateError: It is not UTF-8.
    """
    try:
        text = content.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise LocateError(f"{where} cannot be read: not UTF-8 (byte {error.start})") from error
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
