"""The streams of this process's ranks, and how a call's work is bracketed by the caller's own streams.

    caller's stream   ---- event ------------------------------------------ wait ---- optimizer ...
    compute                  `-- wait  F  F  B ... B --- event ----------------'
    channels, inputs         `-- wait     (see handover, feed)

What the caller has put on a device before a call (an optimizer's step, a batch) comes before all of the call's work there, what it
puts there afterwards comes after; so memory that either of them lets go of may be used again by the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from fxchimera.runtime.devices.crew import Crew, OfRank
from fxchimera.runtime.devices.devices import Devices
from fxchimera.runtime.devices.streams import Accelerator
from fxchimera.schedule.action import Action

__all__ = ["Lane", "Lanes"]

_T = TypeVar("_T")
_Member = TypeVar("_Member", bound=OfRank)


class Lane:
    """The device of one rank, the stream that it computes on, and the one that its inputs come by."""

    def __init__(self, device: torch.device, accelerator: Accelerator) -> None:
        self.device, self.accelerator = device, accelerator
        self.compute = accelerator.stream(device)
        self.inputs = accelerator.stream(device)
        self.streams = [self.compute, self.inputs]
        """All streams that this rank's memory is written on."""
        self.begun, self.started = accelerator.event(self.compute, timed=True), 0.0
        """Where a call's work on the device begins, and the host's seconds then."""
        self.stamps: list[tuple[Action, torch.Event, torch.Event]] = []
        self.carried: tuple[torch.Event, torch.Event] | None = None
        """When the latest message was on its way."""

    @contextmanager
    def entered(self, begun: torch.Event, started: float) -> Iterator[None]:
        """Compute on this lane, on the present thread, after ``begun``; backwards run on this thread, too.

        torch would run them on one thread for each device, which ranks that share it would queue for, and which knows nothing of
        the micro-batch's names for random draws.
        """
        accelerator, self.begun, self.started, self.stamps = self.accelerator, begun, started, []
        index, before = torch.accelerator.current_device_index(), accelerator.current(self.device)
        for stream in self.streams:
            accelerator.wait(stream, begun)
        accelerator.use(self.compute)
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            accelerator.use(before)
            torch.accelerator.set_device_index(index)


class Lanes:
    """The lanes of the ranks of this process; none on the CPU, where nothing needs to wait."""

    def __init__(self, devices: Devices, ranks: Sequence[int]) -> None:
        self.devices = devices
        accelerator = devices.accelerator
        self._accelerator = accelerator
        self._lanes = {} if accelerator is None else {rank: Lane(devices.by_rank[rank], accelerator) for rank in ranks}

    def __getitem__(self, rank: int) -> Lane:
        """The lane of a rank of this process, which is not on the CPU."""
        return self._lanes[rank]

    def of(self, rank: int) -> Lane | None:
        """The lane of a rank of this process, None on the CPU."""
        return self._lanes.get(rank)

    def call(self, crew: Crew[_Member], act: Callable[[_Member], _T]) -> list[_T]:
        """Let a crew act, every rank on its lane; returns what it returns, by rank.

        Raises:
            PipelineError: A rank failed.
        """
        accelerator = self._accelerator
        if accelerator is None:
            return crew.call(act)
        callers = {lane.device: accelerator.current(lane.device) for lane in self._lanes.values()}
        begun = {device: accelerator.event(stream, timed=True) for device, stream in callers.items()}
        started = time.monotonic()

        def acting(member: _Member) -> _T:
            lane = self._lanes[member.rank]
            with lane.entered(begun[lane.device], started):
                return act(member)

        try:
            return crew.call(acting)
        finally:  # also after a failure: the caller goes on with the parameters
            for lane in self._lanes.values():
                for stream in lane.streams:
                    accelerator.wait(callers[lane.device], accelerator.event(stream))
