"""When each action of a rank began and ended on its device, where the host only knows when it was asked for.

    compute    stamp F stamp      stamp B stamp          zero is the step's first event on that device
    channel              stamp copy stamp

Stamps are events that are read when the rank has come to the end of its actions, so nothing waits for them before.
"""

from __future__ import annotations

from typing import Any

import torch

from fxchimera.runtime.devices.lanes import Lane
from fxchimera.runtime.timed import Timed
from fxchimera.schedule.action import Action
from fxchimera.schedule.timeline import Event

__all__ = ["LaneTimed", "lane_events"]


class LaneTimed(Timed):
    """Also stamps the rank's stream before and after what runs inside; a message was stamped by what carried it."""

    __slots__ = ("_first", "_lane")

    def __init__(self, rank: int, action: Action, events: list[Event], lane: Lane, *, profiled: bool) -> None:
        super().__init__(rank, action, events, profiled=profiled)
        self._lane = lane

    def __enter__(self) -> None:
        super().__enter__()
        self._lane.carried = None
        self._first = self._lane.accelerator.event(self._lane.compute, timed=True)

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        lane = self._lane
        if exception[0] is None:
            whole = lane.carried or (self._first, lane.accelerator.event(lane.compute, timed=True))
            lane.stamps.append((self._action, *whole))


def lane_events(rank: int, lane: Lane) -> list[Event]:
    """Return when the actions since the step began were at work; the host waits for the last of them."""
    stamps, lane.stamps = lane.stamps, []

    def when(event: torch.Event) -> float:
        return lane.started + lane.accelerator.seconds(lane.begun, event)

    return [Event(rank, action, when(first), when(last)) for action, first, last in stamps]
