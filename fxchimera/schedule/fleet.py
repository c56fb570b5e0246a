"""Many pipelines side by side: data-parallel replicas of one order, each with its own noise, and the all-reduce between them.

    pipeline 0    rank 0  rank 1  rank 2  ...        every pipeline runs the same order
    pipeline 1    rank 0  rank 1  rank 2  ...        stage s is all-reduced over all its replicas in all pipelines,
    ...                                              as soon as the last of them has ended its last backward of s

A rank takes part in one all-reduce at a time, in the order in which they become ready; they overlap its further computations.
All pipelines are computed at once, an operation being one row of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fxchimera.errors import ScheduleError
from fxchimera.schedule.order import Order
from fxchimera.schedule.problem import Plan, Problem
from fxchimera.schedule.profile import Costs
from fxchimera.schedule.shop import NEVER, Shop, make_shop, retime

__all__ = ["Fleet", "simulate_fleet"]

_Row = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Times of one step of all pipelines, in seconds.

    Args:
        compute: By pipeline, the makespan without the all-reduce.
        step: End of the last computation or all-reduce of all.
        exposed: What the all-reduce adds, ``step - max(compute)``.
    """

    compute: tuple[float, ...]
    step: float
    exposed: float


def simulate_fleet(
    order: Order,
    costs: Costs,
    pipelines: int,
    *,
    noise: float = 0.0,
    seed: int = 0,
    stage_bytes: Sequence[int] = (),
) -> Fleet:
    """Simulates data-parallel pipelines of one order; some 2,000 ranks take a fraction of a second.

    Args:
        order: A compute-only order.
        costs: Seconds of every stage; ``sync_bytes_per_second`` is the bandwidth of the all-reduce.
        pipelines: How many, W.
        noise: Standard deviation of the normal factor around 1 (never below 0.1) on every computation.
        seed: Of the noise.
        stage_bytes: By stage, bytes of its gradients; a ring over r replicas moves 2(r-1)/r of them.  Nothing moves when empty.

    Raises:
        ScheduleError: ``pipelines`` is below 1, or the order cannot proceed.
    """
    if pipelines < 1:
        raise ScheduleError(f"pipelines must be at least 1, got {pipelines}")
    problem = Problem.of(order.placement, costs)
    plan = problem.plan(order)
    shop = make_shop(problem, plan)
    if retime(shop, NEVER, -1.0, -1, 0) >= NEVER:
        raise ScheduleError(
            f"order {order.name!r} cannot proceed: its ranks wait for each other; check(lower(order)) names the actions"
        )
    ends = _ends(shop, plan, pipelines, noise, seed)
    compute = np.max([ends[row[-1]] for row in plan.ranks if row], axis=0)
    last = float(np.max(compute))
    step = max(last, _reduced(problem, plan, ends, pipelines, stage_bytes))
    return Fleet(tuple(float(seconds) for seconds in compute), step, step - last)


def _ends(shop: Shop, plan: Plan, pipelines: int, noise: float, seed: int) -> dict[int, _Row]:
    """By operation, its end in every pipeline; ``shop.log`` is an order in which all data comes before its use."""
    generator = np.random.default_rng(seed)
    free = [np.zeros(pipelines) for _ in plan.ranks]
    ends: dict[int, _Row] = {}
    for op in shop.log:
        rank, data = shop.rank[op], shop.pred[op]
        begin = free[rank] if data < 0 else np.maximum(free[rank], ends[data] + shop.lag[op])
        seconds = shop.seconds[op]
        end = begin + (seconds * np.maximum(0.1, generator.normal(1.0, noise, pipelines)) if noise else seconds)
        ends[op] = free[rank] = end
    return ends


def _reduced(problem: Problem, plan: Plan, ends: dict[int, _Row], pipelines: int, stage_bytes: Sequence[int]) -> float:
    """When the last all-reduce ends."""
    if not stage_bytes:
        return 0.0
    place = problem.placement
    ready, holders = [0.0] * place.num_stages, [set[int]() for _ in range(place.num_stages)]
    for rank, row in enumerate(plan.ranks):
        for op in row:
            cell, kind = divmod(op, 3)
            stage = cell % place.num_stages
            holders[stage].add(rank)
            if kind == 2 or (kind == 1 and plan.fused[cell]):
                ready[stage] = max(ready[stage], float(np.max(ends[op])))
    free, over = [0.0] * place.num_ranks, 0.0
    for stage in sorted(range(place.num_stages), key=lambda stage: (ready[stage], stage)):
        ranks = sorted(holders[stage])
        count = len(ranks) * pipelines
        seconds = 2 * (count - 1) / count * stage_bytes[stage] / problem.costs.sync_bytes_per_second if count > 1 else 0.0
        end = max([ready[stage], *(free[rank] for rank in ranks)]) + seconds
        for rank in ranks:
            free[rank] = end
        over = max(over, end)
    return over
