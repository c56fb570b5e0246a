"""When each action began and ended; torch's profiler, if it is on, sees the action too."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import torch

from fxchimera.schedule.action import Action
from fxchimera.schedule.timeline import Event

__all__ = ["Timed"]


class Timed:
    """Appends one event to ``events`` for what runs inside.

    ``profiled`` also shows it to torch's profiler, as ``PP:`` and the action.  That costs more than the rest of the runtime does
    for an action, so it is for the caller to ask first whether the profiler is on.
    """

    __slots__ = ("_action", "_events", "_rank", "_record", "_start")

    def __init__(self, rank: int, action: Action, events: list[Event], *, profiled: bool) -> None:
        self._rank, self._action, self._events = rank, action, events
        self._record: AbstractContextManager[Any] | None = torch.profiler.record_function(f"PP:{action}") if profiled else None

    def __enter__(self) -> None:
        self._start = time.monotonic()
        if self._record is not None:
            self._record.__enter__()

    def __exit__(self, *exception: Any) -> None:
        if self._record is not None:
            self._record.__exit__(*exception)
        if exception[0] is None:
            self._events.append(Event(self._rank, self._action, self._start, time.monotonic()))
