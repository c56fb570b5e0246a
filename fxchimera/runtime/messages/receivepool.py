"""Buffers for received messages, used again when nothing looks at them any more.

    take -> the message is read into it -> tensors of the message look at it -> autograd keeps some until the backward -> free

When that is, nobody says: a stage may keep a received value for its backward, or pass it on.  So a buffer is free when its memory
has no other user than the pool.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from fxchimera.runtime.message import Form, Key, Payload
from fxchimera_passes._torch import memory_is_shared

__all__ = ["Buffer", "ReceivePool"]

_ALIGN = 64  # bytes; as in the message's own layout


class Buffer:
    """Memory for one message, and the same as sockets want it; ``taken`` until the tensors that look at it are made."""

    __slots__ = ("_form", "_views", "bytes", "memory", "taken")

    def __init__(self, size: int) -> None:
        room = np.empty(size + _ALIGN, dtype=np.uint8)
        start = -room.ctypes.data % _ALIGN
        self.bytes = room[start : start + size].data
        self.memory = torch.from_numpy(room[start : start + size])  # its own ``numpy()`` would count as a user of its memory
        self._form: Form | None = None
        self._views: list[torch.Tensor] = []
        self.taken = True

    @property
    def free(self) -> bool:
        """Whether nothing looks at it."""
        return not self.taken and not memory_is_shared(self.memory, views=len(self._views))

    def unpack(self, key: Key, form: Form) -> Payload:
        """Return the tensors of the message in it; from now on it is taken as long as something looks at them.

        Raises:
            PipelineError: It is another message.
        """
        if self._form is not form and (self._form is None or self._form.metas != form.metas):
            self._views = form.views(self.memory)
        self._form = form
        payload = form.unpack(key, self._views, self.bytes)
        self.taken = False
        return payload


class ReceivePool:
    """Lends buffers; ``made`` counts those that had to be made.

    Args:
        most: How many to keep; with at least as many as are ever lent at once, equal steps make none after the first.
    """

    def __init__(self, most: int) -> None:
        self.made = 0
        self._most = most
        self._kept: deque[Buffer] = deque()

    def take(self, size: int) -> Buffer:
        """Return a buffer of ``size`` bytes with any content, which is the caller's until it is no longer ``taken``."""
        kept = self._kept
        for _ in range(len(kept)):
            buffer = kept[0]
            kept.rotate(-1)  # the one that was lent first is most likely to be free
            if len(buffer.bytes) == size and buffer.free:
                buffer.taken = True
                return buffer
        self.made += 1
        made = Buffer(size)
        if len(kept) == self._most:  # messages have another size now
            unused = next((buffer for buffer in kept if buffer.free), None)
            if unused is not None:
                kept.remove(unused)
        if len(kept) < self._most:
            kept.append(made)
        return made

    @property
    def lent(self) -> int:
        """How many of the buffers that are kept something looks at."""
        return sum(not buffer.free for buffer in self._kept)
