"""Makes streams late: work is put on them before an event is recorded, so that whoever does not wait for it comes too early."""

from __future__ import annotations

import random
import threading

import torch

from fxchimera.runtime.devices.streams import TorchAccelerator

__all__ = ["Late"]


class Late(TorchAccelerator):
    """Puts a matrix product on a stream before some of its events; ``deaf``, no stream waits any more.

    Args:
        share: Of events that come late.
        size: Of the matrices; 4096 takes some milliseconds.
        seed: Which events.
    """

    def __init__(self, share: float, size: int, seed: int = 0) -> None:
        self._share, self._size, self._random, self._lock = share, size, random.Random(seed), threading.Lock()
        self._operands: dict[torch.device, torch.Tensor] = {}
        self.made = 0
        self.deaf = False

    def event(self, stream, *, timed=False):
        with self._lock:
            late = self._random.random() < self._share
            operand = self._operands.get(stream.device)
            if operand is None:
                operand = self._operands[stream.device] = torch.ones(self._size, self._size, device=stream.device)
                torch.accelerator.synchronize(stream.device)
        if late:
            before = self.current(stream.device)
            index = torch.accelerator.current_device_index()
            self.use(stream)
            torch.mm(operand, operand)
            self.use(before)
            torch.accelerator.set_device_index(index)
            self.made += 1
        return super().event(stream, timed=timed)

    def wait(self, stream, event):
        if not self.deaf:
            super().wait(stream, event)
