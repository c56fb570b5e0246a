"""Buffers for received messages, used again when nothing looks at them any more.

    take -> gloo fills it -> tensors of the message look at it -> autograd keeps some until the backward -> free

When that is, nobody says: a stage may keep a received value for its backward, or pass it on.  So a buffer is lent as a tensor over
a numpy view, which torch lets go of when the last tensor that looks at that memory is gone; the view's end brings the buffer back.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import torch

__all__ = ["ReceivePool"]

_ALIGN = 64  # bytes; as in the message's own layout


class ReceivePool:
    """Lends byte buffers; ``made`` counts those that had to be made.

    Args:
        most: How many free ones to keep; with at least as many as are ever lent at once, equal steps make none after the first.
    """

    def __init__(self, most: int) -> None:
        self.made = 0
        self._free: deque[np.ndarray] = deque(maxlen=most)  # on overflow the one that has been free longest is dropped
        self._lent: dict[int, tuple[weakref.ref[np.ndarray], np.ndarray]] = {}

    def take(self, size: int) -> torch.Tensor:
        """Return a buffer of ``size`` bytes with any content, for as long as a tensor looks at its memory."""
        memory = self._found(size)
        if memory is None:
            memory = self._make(size)
        view = memory[:]
        key = id(view)

        def back(_: object) -> None:
            self._free.append(self._lent.pop(key)[1])

        self._lent[key] = weakref.ref(view, back), memory
        return torch.from_numpy(view)

    @property
    def lent(self) -> int:
        """How many buffers something looks at."""
        return len(self._lent)

    def _found(self, size: int) -> np.ndarray | None:
        for _ in range(len(self._free)):
            try:
                memory = self._free.popleft()
            except IndexError:
                break
            if memory.nbytes == size:
                return memory
            self._free.append(memory)
        return None

    def _make(self, size: int) -> np.ndarray:
        self.made += 1
        room = np.empty(size + _ALIGN, dtype=np.uint8)
        start = -room.ctypes.data % _ALIGN
        return room[start : start + size]
