"""Cut a row of costs into contiguous parts, as even as the rules allow.

    costs      5 1 | 2 2 2 | 4 1        parts = 3, bottleneck 6
    position       2       5            a cut at p falls between item p-1 and item p

The smallest possible bottleneck is found exactly: a bisection over the bottleneck, where one test follows the set of positions that
k parts can reach.  One window of previous positions per position (:mod:`fxchimera_passes.runs`) holds all limits, so a test is
O(parts * n) in numpy and no greedy argument is needed.  Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from fxchimera_passes.errors import PartitionError
from fxchimera_passes.runs import Problem, Window, problem_of

__all__ = ["Cut", "cut", "cuts", "most_parts"]

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]
_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Cut:
    """Where to cut, what the heaviest part then costs, and the proven least cost of a heaviest part (in units of the costs)."""

    positions: tuple[int, ...]
    bottleneck: float
    bound: float


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
        PartitionError: no such cut exists, or a cost is negative or not finite.
    """
    problem = problem_of(costs, parts, allowed, crossing, counts, min_count, sizes, caps)
    best = _least_bottleneck(problem)
    if best is None:
        raise PartitionError(_reason(problem, len(costs), counts, min_count))
    return _within(problem, best, None if crossing is None else slack)


def cuts(
    costs: Sequence[float], parts: int, slacks: Sequence[float], *, crossing: Sequence[float], counts: Sequence[int]
) -> tuple[Cut, ...]:
    """Return what :func:`cut` gives for each of ``slacks``, and search for the optimum once."""
    problem = problem_of(costs, parts, None, crossing, counts, 1, None, None)
    best = _least_bottleneck(problem)
    if best is None:
        raise PartitionError(_reason(problem, len(costs), counts, 1))
    return tuple(_within(problem, best, slack) for slack in slacks)


def _within(problem: Problem, best: Sequence[int], slack: float | None) -> Cut:
    """The cut that sends least within ``slack`` of the optimum; without a slack, the optimum."""
    optimum = problem.bottleneck(best)
    chosen = best if slack is None else _least_crossing(problem, optimum, max(optimum, int(optimum * (1.0 + slack))))
    return Cut(
        tuple(int(problem.places[q]) for q in chosen[:-1]), problem.bottleneck(chosen) / problem.scale, optimum / problem.scale
    )


def most_parts(n: int, allowed: Sequence[int] | None = None, counts: Sequence[int] | None = None, min_count: int = 1) -> int:
    """The largest number of parts into which ``n`` items can be cut when every part holds ``min_count``."""
    held = list(accumulate([1] * n if counts is None else counts, initial=0))
    parts, start = 0, 0
    for position in [*(range(1, n) if allowed is None else allowed), n]:
        if held[position] - held[start] >= min_count:
            parts, start = parts + 1, position
    return parts


def _reach(problem: Problem, limit: int) -> tuple[int, ...] | None:
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


def _walk_back(problem: Problem, windows: Sequence[Window], pick: Callable[[int, int, int], int]) -> tuple[int, ...]:
    """Follow the parts from the last to the first; ``pick(part, low, high)`` chooses among that part's ends low to high-1."""
    ends = [len(problem.places) - 1]
    for part in range(problem.parts - 1, 0, -1):
        window, before = windows[part], windows[part - 1]
        low, high = window.clipped(before)
        at = ends[-1] - window.first
        ends.append(before.first + pick(part, int(low[at]), int(high[at]) + 1))
    return tuple(reversed(ends))


def _least_bottleneck(problem: Problem) -> tuple[int, ...] | None:
    """Bisect whole-number limits; every success drops the upper end to what was really reached, so the result is exact."""
    if problem.parts < 1 or len(problem.places) < 2:
        return None
    total = int(problem.cost[-1])
    low = limit = max(-(-total // problem.parts), int(np.diff(problem.cost).max()))
    while (best := _reach(problem, limit)) is None:
        if limit >= total:
            return None
        low, limit = limit + 1, min(2 * limit, total)
    high = problem.bottleneck(best)
    while low < high:
        middle = (low + high) // 2
        found = _reach(problem, middle)
        if found is None:
            low = min(problem.above(middle, problem.ends(high)), high)
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


def _cheapest(problem: Problem, limit: int) -> tuple[float, tuple[int, ...]] | None:
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


def _least_crossing(problem: Problem, optimum: int, limit: int) -> tuple[int, ...]:
    """The most even of the cuts within ``limit`` that send the fewest bytes."""
    found = _cheapest(problem, limit)
    assert found is not None, "the optimum of the first search is feasible in the second"
    least, best = found
    low, high = optimum, problem.bottleneck(best)
    while low < high:
        middle = (low + high) // 2
        found = _cheapest(problem, middle)
        if found is None or found[0] > least:
            low = min(problem.above(middle, problem.cost), high)
        else:
            best, high = found[1], problem.bottleneck(found[1])
    return best


def _reason(problem: Problem, n: int, counts: Sequence[int] | None, min_count: int) -> str:
    inner = [int(p) for p in problem.places[1:-1]]
    most = most_parts(n, inner, counts, min_count)
    if most < problem.parts or not problem.caps:
        return f"at most {most} parts can be cut from {n} items ({len(inner)} places to cut), {problem.parts} were asked for"
    total = max(float(size[-1]) for size in problem.sizes)
    return f"{n} items of {total:.0f} bytes in all do not fit {problem.parts} parts of at most {list(problem.caps)} bytes"
