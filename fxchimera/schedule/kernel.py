"""The annealing of moves.py, compiled where numba is installed, as plain Python elsewhere; the same moves and the same result.

Compiling takes some seconds in a process's first search, which numba's cache shortens for later processes.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from fxchimera.schedule.moves import PER_MOVE, anneal
from fxchimera.schedule.problem import Plan, Problem
from fxchimera.schedule.shop import make_shop, plan_of, random_numbers

__all__ = ["annealed", "has_numba"]


def has_numba() -> bool:
    """Whether the compiled form is there."""
    return importlib.util.find_spec("numba") is not None


def annealed(
    problem: Problem,
    plan: Plan,
    *,
    moves: int,
    seed: int = 0,
    hot: float = 0.03,
    cold: float = 0.001,
    toggles: float = 0.0,
    floor: float = 0.0,
    compiled: bool = False,
) -> tuple[Plan, float, int]:
    """A plan improved by ``moves`` random moves: the plan, its makespan in seconds, and how many operations were looked at.

    Args:
        problem: What the plan solves.
        plan: A plan within the caps.
        moves: Number of moves.
        seed: Of the random numbers; one seed gives one result.
        hot: First temperature, in units of the mean forward.
        cold: Last temperature, in units of the mean forward.
        toggles: Share of moves that fuse or split a backward.
        floor: Stop at this makespan.
        compiled: Use numba.
    """
    shop = make_shop(problem, plan)
    unit = sum(problem.costs.forward) * problem.placement.weight_copies / problem.placement.num_ranks or 1.0
    unit = sum(problem.costs.forward) / len(problem.costs.forward) or unit
    numbers: Any = random_numbers(seed, PER_MOVE * moves)
    best: Any = [list(row) for row in shop.seq]
    run: Any = anneal
    if compiled:
        from fxchimera.schedule import native

        run, shop, numbers, best = native.prepare(shop, numbers, best)
    makespan = run(shop, numbers, hot * unit, cold * unit, 12, toggles, best, floor + 1e-9)
    ranks = [[int(op) for op in row if op >= 0] for row in best]
    present = {op for ops in ranks for op in ops}
    fused = [3 * cell + 2 not in present for cell in range(problem.num_cells)]
    return Plan(ranks, fused), float(makespan), int(shop.state[3])
