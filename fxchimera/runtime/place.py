"""Where a process is at work, written down before every action, in a file that outlives it.

A process that is killed tells nobody where it was.  Its last words are in a page of memory that the system keeps as a file, so
another process of the same machine can read them; writing them is a copy of some bytes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile

__all__ = ["IDLE", "Place", "forget", "label", "last_words"]

_BYTES = 240


def label(text: str) -> bytes:
    """What :meth:`Place.write` takes, of one length for all texts; a longer one is cut."""
    return text.encode()[:_BYTES].ljust(_BYTES)


IDLE = label("outside of a step")


class Place:
    """The page of this process; ``path`` is its file, readable by this user alone."""

    def __init__(self) -> None:
        handle, self.path = tempfile.mkstemp(prefix="fxchimera-place-")
        try:
            os.ftruncate(handle, _BYTES)
            self._page = mmap.mmap(handle, _BYTES)
        finally:
            os.close(handle)
        self._page[:] = IDLE

    def write(self, words: bytes) -> None:
        """Write a :func:`label`."""
        self._page[:] = words

    def __str__(self) -> str:
        return _read(self._page[:])

    def remove(self) -> None:
        """Remove the file; what is written from now on is for nobody."""
        forget(self.path)


def last_words(path: str) -> str | None:
    """Read what a process of this machine wrote, None if its file is gone."""
    try:
        with open(path, "rb") as file:
            return _read(file.read())
    except OSError:
        return None


def forget(path: str) -> None:
    """Remove the file of a process that is gone."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def _read(words: bytes) -> str:
    return words.decode(errors="replace").rstrip()
