"""Sums over a row of items: what each run of them costs and weighs, and where the parts of a cut can begin and end.

    costs      5   1   2   2   2   4   1
    sums     0   5   6   8  10  12  16  17         a part from place 1 to 4 costs 10 - 5

Upper limits (cost, bytes) and lower limits (each part holds something) both turn into one window of begins for each end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fxchimera_passes.errors import PartitionError

__all__ = ["Problem", "Window", "problem_of"]

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]

# Costs are scaled to whole numbers below this total: sums of them are exact in int64 and in float64.
_EXACT_TOTAL = 2**52


@dataclass(frozen=True, slots=True)
class Window:
    """Ends ``first``, ``first + 1``, ... of one part, each with its first and last possible begin."""

    first: int
    oldest: _Ints
    newest: _Ints

    def clipped(self, before: Window | None) -> tuple[_Ints, _Ints]:
        """The begins as indices into the ends of the part before (the first part begins at place 0 alone)."""
        offset, size = (0, 1) if before is None else (before.first, len(before.oldest))
        return np.maximum(self.oldest - offset, 0), np.minimum(self.newest - offset, size - 1)


@dataclass(frozen=True, slots=True)
class Problem:
    """Sums up to each usable position (0, the allowed ones, n); ``newest[q]`` is the last begin of a part that ends at q.

    ``cost`` is in whole numbers, ``scale`` times the caller's.
    """

    places: _Ints
    scale: float
    cost: _Ints
    sizes: tuple[_Floats, ...]
    crossing: _Floats
    newest: _Ints
    parts: int
    caps: tuple[float, ...]

    def windows(self, limit: int) -> list[Window]:
        """For each part, where it can end at all when none costs more than ``limit``, and where it can begin for each such end."""
        total = int(self.cost[-1])
        found = []
        for part in range(1, self.parts + 1):
            low = int(np.searchsorted(self.cost, total - (self.parts - part) * limit, side="left"))
            high = int(np.searchsorted(self.cost, part * limit, side="right"))
            ends = np.arange(low, max(low, high), dtype=np.int64)
            begins = np.searchsorted(self.cost, self.cost[ends] - limit, side="left")
            if self.caps:
                size = self.sizes[(part - 1) % len(self.sizes)]  # one for all, or each its own
                begins = np.maximum(begins, np.searchsorted(size, size[ends] - self.caps[part - 1], side="left"))
            found.append(Window(low, begins, self.newest[ends]))
        return found

    def ends(self, limit: int) -> _Ints:
        """The sums at which a part can end when none costs more than ``limit``."""
        return np.concatenate([self.cost[window.first : window.first + len(window.oldest)] for window in self.windows(limit)])

    def above(self, limit: int, ends: _Ints) -> int:
        """The least cost more than ``limit`` of a run that ends at one of the sums ``ends``: the next bottleneck worth a test."""
        begins = np.searchsorted(self.cost, ends - limit, side="left")
        some = begins > 0
        return int((ends[some] - self.cost[begins[some] - 1]).min()) if some.any() else limit + 1

    def bottleneck(self, chosen: Sequence[int]) -> int:
        """Cost of the heaviest part when the parts end at the places ``chosen`` (the last of them is n)."""
        return int(np.diff(self.cost[[0, *chosen]]).max())


def _scale(costs: Sequence[float]) -> float:
    """A power of two (1.0 for whole numbers) by which ``costs`` become whole numbers with an exact sum."""
    values = np.asarray(costs, np.float64)
    if values.size and (not np.isfinite(values).all() or values.min() < 0.0):
        odd = int(np.argmax(~np.isfinite(values) | (values < 0.0)))
        raise PartitionError(f"costs must be finite and not negative, got costs[{odd}]={values[odd]}")
    total = float(values.sum())
    if total == 0.0 or (total < _EXACT_TOTAL and bool((values == np.floor(values)).all())):
        return 1.0
    return float(2.0 ** min(np.floor(np.log2(_EXACT_TOTAL) - np.log2(total)), 1000.0))


def _prefix(values: npt.ArrayLike) -> npt.NDArray[Any]:
    return np.concatenate(([0], np.cumsum(values)))


def problem_of(
    costs: Sequence[float],
    parts: int,
    allowed: Sequence[int] | None,
    crossing: Sequence[float] | None,
    counts: Sequence[int] | None,
    min_count: int,
    sizes: Sequence[float] | Sequence[Sequence[float]] | None,
    caps: Sequence[float] | None,
) -> Problem:
    """Sum up what :func:`fxchimera_passes.balance.cut` was given.

    Raises:
        PartitionError: a cost is negative or not finite.
    """
    n = len(costs)
    table = np.atleast_2d(np.zeros(n) if sizes is None else np.asarray(sizes, np.float64))
    places = np.arange(n + 1) if allowed is None else np.asarray([0, *allowed, n], np.int64)
    scale = _scale(costs)
    whole = np.rint(np.asarray(costs, np.float64) * scale)
    before = np.arange(len(places), dtype=np.int64) - 1
    if counts is not None:
        held = _prefix(np.asarray(counts, np.int64))[places]
        before = np.minimum(before, np.searchsorted(held, held - min_count, side="right") - 1)
    return Problem(
        places=places,
        scale=scale,
        cost=_prefix(whole.astype(np.int64))[places],
        sizes=tuple(_prefix(row)[places] for row in table),
        crossing=np.zeros(len(places)) if crossing is None else np.asarray(crossing, np.float64)[places],
        newest=np.asarray(before, np.int64),
        parts=parts,
        caps=() if caps is None else tuple(caps),
    )
