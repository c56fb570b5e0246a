"""Where a process is at work, written down before every action, in memory that outlives it.

A process that is killed tells nobody where it was.  Its last words are in a page of memory that has no name in any folder, and that
other processes of the same machine map while it lives; the system keeps it as long as one of them does, and leaves nothing behind
after the last.  Writing is a copy of some bytes.
"""

from __future__ import annotations

import mmap
import os

__all__ = ["IDLE", "Place", "Words", "label"]

_BYTES = 240


def label(text: str) -> bytes:
    """What :meth:`Place.write` takes, of one length for all texts; a longer one is cut."""
    return text.encode()[:_BYTES].ljust(_BYTES)


IDLE = label("outside of a step")


class Place:
    """The page of this process; ``path`` is where others of this machine and user find it, "" on a system without such pages."""

    def __init__(self) -> None:
        self.path, self._handle = "", -1
        self._page: mmap.mmap | bytearray = bytearray(_BYTES)
        if hasattr(os, "memfd_create"):
            self._handle = os.memfd_create("fxchimera-place")
            os.fchmod(self._handle, 0o600)
            os.ftruncate(self._handle, _BYTES)
            self._page = mmap.mmap(self._handle, _BYTES)
            self.path = f"/proc/{os.getpid()}/fd/{self._handle}"
        self.write(IDLE)

    def write(self, words: bytes) -> None:
        """Write a :func:`label`."""
        self._page[:] = words

    def __str__(self) -> str:
        return _read(self._page[:])

    def remove(self) -> None:
        """Give the page up; what is written from now on is for nobody.  May be called more than once."""
        handle, self._handle = self._handle, -1
        self._page = bytearray(self._page[:])
        if handle >= 0:
            os.close(handle)


class Words:
    """What another process of this machine writes, and has written last.

    Raises:
        OSError: It has none, or is gone already.
    """

    def __init__(self, path: str) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._page = mmap.mmap(handle, _BYTES, access=mmap.ACCESS_READ)
        finally:
            os.close(handle)

    def __str__(self) -> str:
        return _read(self._page[:])


def _read(words: bytes | bytearray) -> str:
    return words.decode(errors="replace").rstrip()
