"""When each action began and ended; torch's profiler, if it is on, sees the action too."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import torch

from fxchimera.schedule.action import Action
from fxchimera.schedule.timeline import Event

__all__ = ["Timed", "shown"]


def shown(action: Action | None) -> AbstractContextManager[Any]:
    """Show torch's profiler what runs inside, under the name that ``torch.distributed.pipelining`` gives an action: ``PP:0F3``.

    That costs more than the rest of the runtime does for an action: the caller asks first whether the profiler is on.
    """
    return torch.profiler.record_function(f"PP:{action}")


class Timed:
    """Appends one event to ``events`` for what runs inside; ``profiled`` also shows it to torch's profiler."""

    __slots__ = ("_action", "_events", "_rank", "_record", "_start")

    def __init__(self, rank: int, action: Action, events: list[Event], *, profiled: bool) -> None:
        self._rank, self._action, self._events = rank, action, events
        self._record: AbstractContextManager[Any] | None = shown(action) if profiled else None

    def __enter__(self) -> None:
        self._start = time.monotonic()
        if self._record is not None:
            self._record.__enter__()

    def __exit__(self, *exception: Any) -> None:
        if self._record is not None:
            self._record.__exit__(*exception)
        if exception[0] is None:
            self._events.append(Event(self._rank, self._action, self._start, time.monotonic()))
