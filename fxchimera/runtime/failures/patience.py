"""One wait for other ranks: in naps, with a bound, left when any rank has failed, and told about, once, when it is long.

    rank 0 waits for rank 1, which waits for rank 3, which is at: stage 3 (down), micro-batch 0, action 3F0

A slow rank holds up all others, most of which only wait for each other.  So whoever waits writes down for whom, and whoever waits
long follows these notes to the rank that does not wait.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import Protocol

from fxchimera.errors import PipelineError
from fxchimera.runtime.failures.place import label

__all__ = ["Awaited", "Patience", "Whereabouts"]

_LOGGER = logging.getLogger("fxchimera")
_WAITS, _ALL = "; waits for ", "the others"
_ASKING_SECONDS = 5.0  # this long before they are wanted, the whereabouts of ranks on other machines are asked for


@dataclass(frozen=True, slots=True)
class Awaited:
    """Who waits for whom: numbers of processes, or of ranks that are threads; ``meeting`` when all wait for all of them."""

    own: int
    others: tuple[int, ...]
    meeting: bool = False


class Whereabouts(Protocol):
    """What a wait needs to know of the ranks; members are processes, or ranks that are threads."""

    @property
    def watchful(self) -> bool:
        """Whether long waits are told about."""

    def names(self) -> dict[str, int]:
        """All members by name."""

    def words(self, member: int) -> str | None:
        """What a member has written down; None when that is not known."""

    def mark(self, member: int, words: bytes) -> None:
        """Write down where a member of this process is."""

    def inquire(self) -> None:
        """Ask for the words of those that are on other machines."""

    def look(self) -> None:
        """Look whether what is waited for can still come."""

    def check(self) -> None:
        """Raise if any rank has failed."""

    def blame(self, member: int, text: str) -> PipelineError:
        """Make all ranks fail; returns the error to raise."""


class Patience:
    """What a rank that waits calls between its naps; used as a context, it leaves no note behind.

    Args:
        ranks: Where the ranks are.
        what: Its text says who waits, and where.
        seconds: How long the wait may take.
        slow: After how many seconds it is told about.
        awaited: Who waits for whom, if that is known.
    """

    __slots__ = ("_awaited", "_before", "_began", "_ranks", "_seconds", "_slow", "_told", "_what")

    def __init__(self, ranks: Whereabouts, what: object, seconds: float, slow: float, awaited: Awaited | None) -> None:
        self._ranks, self._what, self._awaited = ranks, what, awaited
        self._seconds, self._slow = seconds, slow
        self._began = time.monotonic()
        self._before: bytes | None = None
        self._told = not ranks.watchful or awaited is None

    def __enter__(self) -> Patience:
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None and self._awaited is not None:
            self._ranks.mark(self._awaited.own, self._before)

    def __call__(self) -> None:
        """Look around.

        Raises:
            PipelineError: Another rank has failed, or the time is over.
        """
        self._ranks.look()
        self._ranks.check()
        waited = time.monotonic() - self._began
        if self._awaited is not None and self._before is None:
            self._note(self._awaited)
        if waited > self._seconds:
            raise self._end()
        if self._awaited is not None and waited > min(self._slow, self._seconds) - _ASKING_SECONDS:
            self._ranks.inquire()
        if not self._told and waited > self._slow:
            self._told = True
            _LOGGER.warning("%s", self._warning(waited))

    def _note(self, awaited: Awaited) -> None:
        words = self._ranks.words(awaited.own) or ""
        self._before = label(words)
        name = _ALL if awaited.meeting else next(name for name, member in self._ranks.names().items() if member in awaited.others)
        where = str(self._what) if awaited.meeting else words
        self._ranks.mark(awaited.own, label(f"{where}{_WAITS}{name}"))

    def _end(self) -> PipelineError:
        """The time is over."""
        late = self._late()
        advice = "A longer limit is set by pipeline(..., wait_seconds=)"
        if len(late) != 1:
            return PipelineError(f"{self._what} has waited {self._seconds:g} s; the sender is slow or gone. {advice}")
        ((member, where),) = late.items()
        return self._ranks.blame(member, f"{self._what} has waited {self._seconds:g} s for it; it is at: {where}. {advice}")

    def _warning(self, waited: float) -> str:
        late = self._late()
        names = {member: name for name, member in self._ranks.names().items()}
        first = "" if self._awaited is None or self._awaited.meeting else names[self._awaited.others[0]]
        told = " and ".join(f"{names[member]}, which is at: {where}" for member, where in late.items())
        if not late:
            told = "an exchange for which every rank is there"
        elif first and self._awaited is not None and self._awaited.others[0] not in late:
            told = f"{first}, which waits for {told}"
        limit = "" if math.isinf(self._seconds) else f", for up to {self._seconds:g} s"
        advice = f"it waits on{limit} (pipeline(..., slow_seconds=, wait_seconds=))"
        return f"{self._what} has waited {waited:.0f} s for {told}; {advice}"

    def _late(self) -> dict[int, str]:
        """Those that keep this rank waiting and do not wait themselves, and where they are."""
        late: dict[int, str] = {}
        if self._awaited is None:
            return late
        names = self._ranks.names()
        for member in self._awaited.others:
            seen = {self._awaited.own}
            while member not in seen:
                seen.add(member)
                where, _, name = (self._ranks.words(member) or "a place that is not known").partition(_WAITS)
                if name in names:
                    member = names[name]
                    continue
                if name != _ALL or not self._awaited.meeting:
                    late[member] = where
                break
        return late
