"""One rank's failure becomes every rank's error, and no wait is without a bound.

The first cause wins.  A rank that waits for a message looks here between short naps, so it stops within a fraction of a second
after another rank has failed, and it raises on its own when the message has not come within the limit.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from fxchimera.errors import PipelineError
from fxchimera.runtime.grid import Grid
from fxchimera.runtime.place import Place

__all__ = ["NAP_SECONDS", "Cause", "Failure", "Limits"]

_T = TypeVar("_T")

NAP_SECONDS = 0.05
"""How long a rank that waits sleeps at most before it looks whether another has failed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a rank waits for one message before it gives up, in seconds."""

    wait_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class Cause:
    """What failed first: the rank, and a text that names stage, direction, micro-batch, action and the original exception."""

    rank: int
    text: str

    def error(self) -> PipelineError:
        """Return the error that every rank raises."""
        return PipelineError(f"rank {self.rank} failed: {self.text}")


class Failure:
    """The cause of a failure as one process sees it; set once, by whoever is first.

    ``place`` is where a rank that is a process writes down what it does.
    """

    place: Place | None = None

    def __init__(self, limits: Limits, grid: Grid | None = None) -> None:
        self.limits = limits
        self.grid = grid or Grid.of_threads(1)
        self._lock = threading.Lock()
        self._cause: Cause | None = None

    @property
    def cause(self) -> Cause | None:
        """The first cause, None while nothing has failed."""
        return self._cause

    def cause_at(self, rank: int, text: str) -> Cause:
        """Make the cause of what failed on ``rank`` of this process's pipeline."""
        return self.cause_in(self.grid.row[rank], text) if self.grid.width > 1 else Cause(rank, text)

    def cause_in(self, process: int, text: str) -> Cause:
        """Make the cause of what failed in a process; of several pipelines, the text says which."""
        if self.grid.width == 1:
            return Cause(process, text)
        pipeline, rank = self.grid.place_of(process)
        return Cause(process, f"pipeline {pipeline}, its rank {rank}, {text}")

    def report(self, cause: Cause) -> Cause:
        """Note a failure and return the first cause, which may be another's."""
        with self._lock:
            if self._cause is None:
                self._cause = cause
            return self._cause

    def check(self) -> None:
        """Raise if any rank has failed."""
        if self._cause is not None:
            raise self._cause.error()

    def look(self) -> None:
        """Called now and then by whoever waits: look whether what is waited for can still come."""

    def fate_of(self, process: int) -> str | None:
        """Say what has become of a process; None when nothing is wrong, or nothing known."""
        return None

    def patience(self, what: object, seconds: float | None = None) -> Callable[[], None]:
        """Return what a rank that waits calls between its naps; the text of ``what`` says who waits.

        It raises :class:`PipelineError` when another rank has failed, or ``seconds`` (else the usual limit) have passed.
        """
        limit = self.limits.wait_seconds if seconds is None else seconds
        deadline = time.monotonic() + limit

        def between() -> None:
            self.look()
            self.check()
            if time.monotonic() > deadline:
                where = f"pipeline {self.grid.pipeline}, " if self.grid.width > 1 else ""
                raise PipelineError(
                    f"{where}{what} has waited {limit:g} s; the sender is slow or gone. A longer limit is "
                    "set by pipeline(..., wait_seconds=)"
                )

        return between

    def wait(self, source: queue.SimpleQueue[_T], what: object, seconds: float | None = None) -> _T:
        """Take the next item of ``source``; see :meth:`patience`.

        Raises:
            PipelineError: Another rank has failed meanwhile, or the limit has passed.
        """
        between = self.patience(what, seconds)
        while True:
            try:
                return source.get(timeout=NAP_SECONDS)
            except queue.Empty:
                between()
