"""Cut a row of costs into contiguous parts, as even as the rules allow.

    costs      5 1 | 2 2 2 | 4 1        parts = 3, bottleneck 6
    position       2       5            a cut at p falls between item p-1 and item p

The smallest possible bottleneck is found exactly: a bisection over the bottleneck, where one test follows the set of positions that
k parts can reach.  Upper limits (cost, bytes) and lower limits (each part holds something) both turn into one window of previous
positions per position, so a test is O(parts * n) in numpy and no greedy argument is needed.  Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fxchimera_passes.errors import PartitionError

__all__ = ["Cut", "cut", "cuts", "most_parts"]

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]
_Bools = npt.NDArray[np.bool_]

# Costs are scaled to whole numbers below this total: sums of them are exact in int64 and in float64.
_EXACT_TOTAL = 2**52


@dataclass(frozen=True, slots=True)
class Cut:
    """Where to cut, what the heaviest part then costs, and the proven least cost of a heaviest part (in units of the costs)."""

    positions: tuple[int, ...]
    bottleneck: float
    bound: float


@dataclass(frozen=True, slots=True)
class _Window:
    """Ends ``first``, ``first + 1``, ... of one part, each with its first and last possible begin."""

    first: int
    oldest: _Ints
    newest: _Ints

    def clipped(self, before: _Window | None) -> tuple[_Ints, _Ints]:
        """The begins as indices into the ends of the part before (the first part begins at place 0 alone)."""
        offset, size = (0, 1) if before is None else (before.first, len(before.oldest))
        return np.maximum(self.oldest - offset, 0), np.minimum(self.newest - offset, size - 1)


@dataclass(frozen=True, slots=True)
class _Problem:
    """Sums up to each usable position (0, the allowed ones, n); ``newest[q]`` is the last begin of a part that ends at q."""

    places: _Ints
    cost: _Ints
    sizes: tuple[_Floats, ...]
    crossing: _Floats
    newest: _Ints
    parts: int
    caps: tuple[float, ...]

    def windows(self, limit: int) -> list[_Window]:
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
            found.append(_Window(low, begins, self.newest[ends]))
        return found

    def above(self, limit: int) -> int:
        """The least cost of any run of items that is more than ``limit``: the next bottleneck worth a test."""
        begins = np.searchsorted(self.cost, self.cost - limit, side="left")
        ends = np.flatnonzero(begins > 0)
        return int((self.cost[ends] - self.cost[begins[ends] - 1]).min()) if len(ends) else limit + 1

    def bottleneck(self, chosen: Sequence[int]) -> int:
        """Cost of the heaviest part when the parts end at the places ``chosen`` (the last of them is n)."""
        return int(np.diff(self.cost[[0, *chosen]]).max())


def cut(
    costs: Sequence[float],
    parts: int,
    *,
    allowed: Sequence[int] | None = None,
    crossing: Sequence[float] | None = None,
    counts: Sequence[int] | None = None,
    min_count: int = 1,
    sizes: Sequence[float] | Sequence[Sequence[float]] | None = None,
    caps: Sequence[float] | None = None,
    slack: float = 0.0,
) -> Cut:
    """Cut ``costs`` into non-empty runs with the least possible heaviest run, then with the least crossing bytes.

    Args:
        costs: one non-negative number per item, in any unit.
        parts: how many runs, at least 1.
        allowed: positions (1 to n-1, ascending) where a cut may fall; all of them when None.
        crossing: n+1 numbers, the bytes that a cut at each position sends; the least sum within ``slack`` wins.
        counts: what each item holds of something that every run needs ``min_count`` of (parameters to own).
        min_count: see ``counts``.
        sizes: bytes of each item; or, for each part, the bytes of each item in that part.
        caps: the most bytes that each run may hold.
        slack: relative distance from the optimum that may be given up for fewer crossing bytes.

    Raises:
        PartitionError: no such cut exists.
    """
    scale = _scale(costs)
    problem = _problem(costs, parts, scale, allowed, crossing, counts, min_count, sizes, caps)
    best = _least_bottleneck(problem)
    if best is None:
        raise PartitionError(_reason(problem, len(costs), counts, min_count))
    return _within(problem, scale, best, None if crossing is None else slack)


def cuts(
    costs: Sequence[float], parts: int, slacks: Sequence[float], *, crossing: Sequence[float], counts: Sequence[int]
) -> tuple[Cut, ...]:
    """Return what :func:`cut` gives for each of ``slacks``, and search for the optimum once."""
    scale = _scale(costs)
    problem = _problem(costs, parts, scale, None, crossing, counts, 1, None, None)
    best = _least_bottleneck(problem)
    if best is None:
        raise PartitionError(_reason(problem, len(costs), counts, 1))
    return tuple(_within(problem, scale, best, slack) for slack in slacks)


def _within(problem: _Problem, scale: float, best: Sequence[int], slack: float | None) -> Cut:
    """The cut that sends least within ``slack`` of the optimum; without a slack, the optimum."""
    optimum = problem.bottleneck(best)
    chosen = best if slack is None else _least_crossing(problem, optimum, max(optimum, int(optimum * (1.0 + slack))))
    return Cut(tuple(int(problem.places[q]) for q in chosen[:-1]), problem.bottleneck(chosen) / scale, optimum / scale)


def most_parts(n: int, allowed: Sequence[int] | None = None, counts: Sequence[int] | None = None, min_count: int = 1) -> int:
    """The largest number of parts into which ``n`` items can be cut when every part holds ``min_count``."""
    held = np.concatenate(([0], np.cumsum(np.ones(n, np.int64) if counts is None else np.asarray(counts, np.int64))))
    parts, start = 0, 0
    for position in [*(range(1, n) if allowed is None else allowed), n]:
        if held[position] - held[start] >= min_count:
            parts, start = parts + 1, position
    return parts


def _scale(costs: Sequence[float]) -> float:
    """A power of two (1.0 for whole numbers) by which ``costs`` become whole numbers with an exact sum."""
    values = np.asarray(costs, np.float64)
    if values.size and (not np.isfinite(values).all() or values.min() < 0.0):
        raise PartitionError("costs must be finite and not negative")
    total = float(values.sum())
    if total == 0.0 or (total < _EXACT_TOTAL and bool((values == np.floor(values)).all())):
        return 1.0
    return float(2.0 ** min(np.floor(np.log2(_EXACT_TOTAL) - np.log2(total)), 1000.0))


def _prefix(values: npt.ArrayLike) -> npt.NDArray[Any]:
    return np.concatenate(([0], np.cumsum(values)))


def _problem(
    costs: Sequence[float],
    parts: int,
    scale: float,
    allowed: Sequence[int] | None,
    crossing: Sequence[float] | None,
    counts: Sequence[int] | None,
    min_count: int,
    sizes: Sequence[float] | Sequence[Sequence[float]] | None,
    caps: Sequence[float] | None,
) -> _Problem:
    n = len(costs)
    table = np.atleast_2d(np.zeros(n) if sizes is None else np.asarray(sizes, np.float64))
    places = np.arange(n + 1) if allowed is None else np.asarray([0, *allowed, n], np.int64)
    whole = np.rint(np.asarray(costs, np.float64) * scale)
    before = np.arange(len(places), dtype=np.int64) - 1
    if counts is not None:
        held = _prefix(np.asarray(counts, np.int64))[places]
        before = np.minimum(before, np.searchsorted(held, held - min_count, side="right") - 1)
    return _Problem(
        places=places,
        cost=_prefix(whole.astype(np.int64))[places],
        sizes=tuple(_prefix(row)[places] for row in table),
        crossing=np.zeros(len(places)) if crossing is None else np.asarray(crossing, np.float64)[places],
        newest=np.asarray(before, np.int64),
        parts=parts,
        caps=() if caps is None else tuple(caps),
    )


def _reach(problem: _Problem, limit: int) -> tuple[int, ...] | None:
    """Ends of parts that cost at most ``limit`` each, or None when there are none."""
    windows = problem.windows(limit)
    reached: list[_Bools] = [np.ones(1, np.bool_)]
    for before, window in zip([None, *windows[:-1]], windows, strict=True):
        low, high = window.clipped(before)
        counted = np.concatenate(([0], np.cumsum(reached[-1])))
        reached.append((high >= low) & (counted[np.maximum(high, -1) + 1] > counted[np.minimum(low, len(counted) - 1)]))
    if not len(reached[-1]) or not reached[-1][-1]:
        return None
    return _walk_back(problem, windows, lambda part, low, high: low + int(np.flatnonzero(reached[part][low:high])[-1]))


def _walk_back(problem: _Problem, windows: Sequence[_Window], pick: Callable[[int, int, int], int]) -> tuple[int, ...]:
    """Follow the parts from the last to the first; ``pick(part, low, high)`` chooses among that part's ends low to high-1."""
    ends = [len(problem.places) - 1]
    for part in range(problem.parts - 1, 0, -1):
        window, before = windows[part], windows[part - 1]
        low, high = window.clipped(before)
        at = ends[-1] - window.first
        ends.append(before.first + pick(part, int(low[at]), int(high[at]) + 1))
    return tuple(reversed(ends))


def _least_bottleneck(problem: _Problem) -> tuple[int, ...] | None:
    """Bisect whole-number limits; every success drops the upper end to what was really reached, so the result is exact."""
    if problem.parts < 1 or len(problem.places) < 2:
        return None
    total = int(problem.cost[-1])
    best = _reach(problem, total)
    if best is None:
        return None
    low = max(-(-total // problem.parts), int(np.diff(problem.cost).max()))
    high = problem.bottleneck(best)
    while low < high:
        middle = (low + high) // 2
        found = _reach(problem, middle)
        if found is None:
            low = min(problem.above(middle), high)
        else:
            best, high = found, problem.bottleneck(found)
    return best


def _window_minimum(values: _Floats, low: _Ints, high: _Ints) -> _Floats:
    """Minimum of ``values[low[q] : high[q] + 1]`` for every q (inf where empty), by a table of power-of-two runs."""
    width = high - low + 1
    result = np.full(len(low), np.inf)
    some = np.flatnonzero(width > 0)
    level = np.zeros(len(low), np.int64)
    level[some] = np.log2(width[some]).astype(np.int64)
    table = values
    for power in range(int(level.max(initial=0)) + 1):
        mine = some[level[some] == power]
        result[mine] = np.minimum(table[low[mine]], table[high[mine] - (1 << power) + 1])
        table = np.minimum(table[: -(1 << power)], table[1 << power :]) if len(table) > 1 << power else table
    return result


def _cheapest(problem: _Problem, limit: int) -> tuple[float, tuple[int, ...]] | None:
    """Least crossing bytes of parts that cost at most ``limit`` each, and the ends of these parts."""
    windows = problem.windows(limit)
    table: list[_Floats] = [np.zeros(1)]
    for before, window in zip([None, *windows[:-1]], windows, strict=True):
        crossing = problem.crossing[window.first : window.first + len(window.oldest)]
        table.append(_window_minimum(table[-1], *window.clipped(before)) + crossing)
    if not len(table[-1]) or not np.isfinite(table[-1][-1]):
        return None
    least = float(table[-1][-1])
    return least, _walk_back(problem, windows, lambda part, low, high: low + int(np.argmin(table[part][low:high])))


def _least_crossing(problem: _Problem, optimum: int, limit: int) -> tuple[int, ...]:
    """The most even of the cuts within ``limit`` that send the fewest bytes."""
    found = _cheapest(problem, limit)
    if found is None:
        raise PartitionError("internal: the optimum of the first search is not feasible in the second")
    least, best = found
    low, high = optimum, problem.bottleneck(best)
    while low < high:
        middle = (low + high) // 2
        found = _cheapest(problem, middle)
        if found is None or found[0] > least:
            low = min(problem.above(middle), high)
        else:
            best, high = found[1], problem.bottleneck(found[1])
    return best


def _reason(problem: _Problem, n: int, counts: Sequence[int] | None, min_count: int) -> str:
    inner = [int(p) for p in problem.places[1:-1]]
    most = most_parts(n, inner, counts, min_count)
    if most < problem.parts or not problem.caps:
        return f"at most {most} parts can be cut from {n} items ({len(inner)} places to cut), {problem.parts} were asked for"
    total = max(float(size[-1]) for size in problem.sizes)
    return f"{n} items of {total:.0f} bytes in all do not fit {problem.parts} parts of at most {list(problem.caps)} bytes"
