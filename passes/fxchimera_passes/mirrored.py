"""Cut where the stages s and S-1-s share a rank, as in two directions and in V shapes: exact for limits on their sums.

    atoms     0 . . i . . . . . . . j . . n          the pairs are cut off from outside to inside;
              [left ]               [right]          what is left, i to j, is for the pairs further in

For every i only the least j is kept: a smaller rest is never harder to divide.  A test takes O(n * n) for each pair, in numpy, and
a bisection over the seconds of the heaviest pair gives the most even cut that keeps the limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Limit", "cut_mirrored"]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]
_HALVINGS = 14


@dataclass(frozen=True, slots=True)
class Limit:
    """What a pair may hold: bytes of each atom in its left and in its right stage, and the most of both together."""

    left: Sequence[float]
    right: Sequence[float]
    cap: float


def cut_mirrored(seconds: Sequence[float], counts: Sequence[int], limits: Sequence[Sequence[Limit]]) -> tuple[int, ...] | None:
    """Return the cut whose heaviest pair takes least, to a ten-thousandth, or None when no cut keeps the limits.

    Args:
        seconds: Of each atom.
        counts: What each atom holds of something that every stage needs one of.
        limits: For each pair, the outermost first.
    """
    problem = _Problem(
        time=_prefix(seconds),
        count=np.concatenate(([0], np.cumsum(np.asarray(counts, np.int64)))),
        pairs=tuple(tuple((_prefix(one.left), _prefix(one.right), one.cap) for one in pair) for pair in limits),
    )
    low, high = float(problem.time[-1]) / len(limits), float(problem.time[-1])
    best = problem.cut(high)
    if best is None:
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = problem.cut(middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best


def _prefix(values: Sequence[float]) -> _Floats:
    return np.concatenate(([0.0], np.cumsum(np.asarray(values, np.float64))))


@dataclass(frozen=True, slots=True)
class _Problem:
    """Sums up to each place between atoms; a pair's limits are (left sums, right sums, cap)."""

    time: _Floats
    count: _Ints
    pairs: tuple[tuple[tuple[_Floats, _Floats, float], ...], ...]

    def cut(self, most_seconds: float) -> tuple[int, ...] | None:
        """Places of a cut that keeps the limits and whose pairs take at most ``most_seconds``, or None."""
        n = len(self.time) - 1
        rest = np.full(n + 1, n + 1, np.int64)  # by left edge the least right edge; n + 1 where there is none
        rest[0] = n
        steps: list[tuple[_Ints, _Ints]] = []
        for number, pair in enumerate(self.pairs):
            inner = 2 * (len(self.pairs) - number - 1)
            limits = (*pair, (self.time, self.time, most_seconds * (1 + 1e-12)))
            chosen, before = self._narrowed(rest, limits, inner)
            steps.append((rest, before))
            rest = chosen
        ends = np.flatnonzero(rest <= n)
        if not len(ends):
            return None
        return self._places(int(ends[0]), rest, steps)

    def _narrowed(self, rest: _Ints, limits: Sequence[tuple[_Floats, _Floats, float]], inner: int) -> tuple[_Ints, _Ints]:
        """The least right edges after one pair more, and the left edge before it that leads there."""
        n = len(rest) - 1
        begins = np.flatnonzero(rest <= n)
        after, before = np.full(n + 1, n + 1, np.int64), np.full(n + 1, -1, np.int64)
        if not len(begins):
            return after, before
        right = rest[begins]
        newest = np.searchsorted(self.count, self.count[right] - 1, side="right") - 1
        least = self._least_rest(inner)
        for end in range(1, n + 1):
            edge = np.full(len(begins), least[end], np.int64)
            for left_sum, right_sum, cap in limits:
                free = cap - (left_sum[end] - left_sum[begins])
                found = np.searchsorted(right_sum, right_sum[right] - free, side="left")
                edge = np.maximum(edge, np.where(free < 0, n + 1, found))
            fits = (self.count[begins] < self.count[end]) & (edge <= newest) & (edge >= end)
            if inner == 0:
                fits &= edge == end
            edge = np.where(fits, edge, n + 1)
            best = int(np.argmin(edge))
            if edge[best] <= n:
                after[end], before[end] = edge[best], begins[best]
        return after, before

    def _least_rest(self, parts: int) -> _Ints:
        """For every left edge the least right edge between which ``parts`` stages find what they need."""
        n = len(self.count) - 1
        following = np.append(np.searchsorted(self.count, self.count + 1, side="left"), n + 1)
        edge = np.arange(n + 1, dtype=np.int64)
        for _ in range(parts):
            edge = following[np.minimum(edge, n + 1)]
        return np.asarray(edge, np.int64)

    def _places(self, middle: int, rest: _Ints, steps: Sequence[tuple[_Ints, _Ints]]) -> tuple[int, ...]:
        places, left = {middle}, middle
        after = rest
        for earlier, before in reversed(steps):
            places |= {left, int(after[left])}
            left, after = int(before[left]), earlier
        return tuple(sorted(places))
