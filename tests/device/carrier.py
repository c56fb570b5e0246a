"""A backend of torch.distributed for ``twin`` devices, whose operations are queued on streams of its own as NCCL's are.

    current stream     ... --- event                          wait ...      after ``work.wait()``
    group's stream              `-- wait  send or receive --- event

The bytes go over gloo.  As on any twin device they move at once, and the vector clocks tell what a real device might do instead.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Carrier", "TwinWork", "register"]


class TwinWork(dist.Work):
    """One operation on the group's stream; ``deaf`` leaves the wait out, for tests of the tests."""

    deaf = False
    waits = 0

    def __init__(self, ended: torch.Event, current: torch.Stream) -> None:
        super().__init__()
        self._ended, self._current, self._asked = ended, current, 0

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Let the current stream wait; the host does not."""
        TwinWork.waits += 1
        if not TwinWork.deaf:
            torch.accelerator.current_stream(self._current.device).wait_event(self._ended)
        return True

    def is_completed(self) -> bool:
        """Say no at first.  Once the host has seen it done, memory of the stream that it was asked on may be used again."""
        self._asked += 1
        if self._asked == 3:
            self._current.wait_event(self._ended)
        return self._asked >= 3


class Carrier(dist.ProcessGroup):
    """Sends and receives between two twin devices."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._register_backend(torch.device("twin"), dist.ProcessGroup.BackendType.CUSTOM, self._gloo)  # who asks what it can do
        self._streams: dict[torch.device, torch.Stream] = {}
        self._kept: list[Any] = []
        self.aborted = False

    def send(self, tensors: list[torch.Tensor], other: int, tag: int) -> TwinWork:
        return self._queued(tensors[0], other, sends=True)

    def recv(self, tensors: list[torch.Tensor], other: int, tag: int) -> TwinWork:
        return self._queued(tensors[0], other, sends=False)

    def abort(self) -> None:
        self.aborted = True

    def shutdown(self) -> None:
        pass

    def getBackendName(self) -> str:  # noqa: N802
        return "twins"

    def _queued(self, tensor: torch.Tensor, other: int, *, sends: bool) -> TwinWork:
        device = tensor.device
        assert device.type == "twin"
        current = torch.accelerator.current_stream(device)
        stream = self._streams.setdefault(device, torch.Stream(device=device))
        stream.wait_event(_event(current))
        torch.accelerator.set_stream(stream)
        try:
            if sends:
                there = tensor.cpu()
                self._kept.append((self._gloo.send([there], other, 0), there))  # a device would be at it whoever holds the work
            else:
                there = torch.empty_like(tensor, device="cpu")
                self._gloo.recv([there], other, 0).wait()
                tensor.copy_(there)
            return TwinWork(_event(stream), current)
        finally:
            torch.accelerator.set_stream(current)


def _event(stream: torch.Stream) -> torch.Event:
    event = torch.Event(device=stream.device)
    event.record(stream)
    return event


def register() -> None:
    """Let torch know the backend, and that it is the one for twin devices."""
    dist.Backend.register_backend("twins", Carrier, devices=["twin"])
