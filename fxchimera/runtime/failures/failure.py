"""One rank's failure becomes every rank's error, and no wait is without a bound.

The first cause wins.  A rank that waits for a message looks here between short naps, so it stops within a fraction of a second
after another rank has failed, and it raises on its own when the message has not come within the limit.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from fxchimera.errors import PipelineError
from fxchimera.runtime.failures.patience import Awaited, Patience
from fxchimera.runtime.failures.place import IDLE
from fxchimera.runtime.grid import Grid

__all__ = ["NAP_SECONDS", "Cause", "Failure", "Limits"]

_T = TypeVar("_T")

NAP_SECONDS = 0.05
"""How long a rank that waits sleeps at most before it looks whether another has failed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a rank waits for one message before it gives up, and before it tells so in the log, in seconds."""

    wait_seconds: float = 600.0
    slow_seconds: float = 10.0


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

    It also knows where its members are, which are ranks that are threads, or processes.  Long waits are told about once a step has
    been ``taken``, as planning, recording and compiling take their time, and unless it is ``calm``, as others are measured.
    """

    def __init__(self, limits: Limits, grid: Grid | None = None) -> None:
        self.limits = limits
        self.grid = grid or Grid.of_threads(1)
        self.taken = self.calm = False
        self._lock = threading.Lock()
        self._cause: Cause | None = None
        self._words: dict[int, bytes] = {}
        self._releases: list[Callable[[], None]] = []

    @property
    def watchful(self) -> bool:
        """Whether long waits are told about."""
        return self.taken and not self.calm

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
            first = self._cause is None
            self._cause = found = self._cause or cause
        for release in self._releases if first else ():
            release()
        return found

    def when_failed(self, release: Callable[[], None]) -> None:
        """Have ``release`` called once when something fails, on any thread: it ends waits that look nowhere."""
        with self._lock:
            self._releases.append(release)
            late = self._cause is not None
        if late:
            release()

    def check(self) -> None:
        """Raise if any rank has failed."""
        if self._cause is not None:
            raise self._cause.error()

    def look(self) -> None:
        """Called now and then by whoever waits: look whether what is waited for can still come."""

    def fate_of(self, process: int) -> str | None:
        """Say what has become of a process; None when nothing is wrong, or nothing known."""
        return None

    def mark(self, member: int, words: bytes) -> None:
        """Write down where a member of this process is; ``words`` is a :func:`~fxchimera.runtime.failures.place.label`."""
        self._words[member] = words

    def words(self, member: int) -> str | None:
        """What a member has written down; None when that is not known."""
        return self._words.get(member, IDLE).decode(errors="replace").rstrip()

    def names(self) -> dict[str, int]:
        """All members by name."""
        return {f"rank {rank}": rank for rank in range(self.grid.depth)}

    def inquire(self) -> None:
        """Ask for the words of those that are on other machines."""

    def message(self, source: int, destination: int) -> Awaited:
        """A rank of this process's pipeline waits for another's message."""
        return Awaited(destination, (source,))

    def blame(self, member: int, text: str) -> PipelineError:
        """Make all ranks fail, because of one; returns the error to raise."""
        return self.report(self.cause_in(member, text)).error()

    def patience(self, what: object, seconds: float | None = None, awaited: Awaited | None = None) -> Patience:
        """Return what a rank that waits, for ``seconds`` or else the usual limit, calls between its naps.

        The text of ``what`` says who waits.
        """
        where = f"pipeline {self.grid.pipeline}, {what}" if self.grid.width > 1 else what
        limits = self.limits
        return Patience(self, where, limits.wait_seconds if seconds is None else seconds, limits.slow_seconds, awaited)

    def wait(self, source: queue.SimpleQueue[_T], what: object, awaited: Awaited | None = None) -> _T:
        """Take the next item of ``source``; see :meth:`patience`.

        Raises:
            PipelineError: Another rank has failed meanwhile, or the limit has passed.
        """
        with self.patience(what, awaited=awaited) as between:
            while True:
                try:
                    return source.get(timeout=NAP_SECONDS)
                except queue.Empty:
                    between()
