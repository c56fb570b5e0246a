"""The makespan of one order under many costs: what a search over cuts asks for some hundred times.

The order fixes who waits for whom, so the computations are put into one line once, each with the two it waits for; a makespan is
then one pass over that line.  The figures are those of :func:`fxchimera.schedule.simulate`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.lower import lower
from fxchimera.schedule.order import Order
from fxchimera.schedule.placement import Placement
from fxchimera.schedule.profile import Costs
from fxchimera.schedule.simulate import simulate

__all__ = ["makespan_of", "step_seconds"]

_NONE = -1


_KINDS = (Kind.F, Kind.I, Kind.W, Kind.B)


class _Step(NamedTuple):
    """One computation: its rank, the step whose result it needs, the boundary the result crosses, and its place in the seconds.

    Plain numbers, because a pass over tens of thousands of them is what the search spends its time on.
    """

    rank: int
    needs: int
    boundary: int
    seconds: int


def makespan_of(order: Order) -> Callable[[Costs], float]:
    """Return the function from costs to the makespan of ``order``; ``order`` without messages is fast.

    Raises:
        ScheduleError: The order cannot proceed.
    """
    if order.is_lowered:
        return lambda costs: simulate(order, costs).makespan
    steps = _line(order)
    return lambda costs: _pass(steps, order.placement.num_ranks, costs)


def step_seconds(order: Order, costs: Costs) -> float:
    """Predicted seconds of a step with everything that travels, the exchange between mirrors and owners (``costs.sync``) too.

    Raises:
        ScheduleError: The order cannot proceed, or the edges are not its placement's.
    """
    if not costs.sync:
        return makespan_of(order)(costs)
    return simulate(lower(order, costs, sync=costs.sync), costs).makespan


def _line(order: Order) -> tuple[_Step, ...]:
    """Every computation after those that it waits for: each rank's list is walked until what it needs is not there yet."""
    place = order.placement
    number: dict[tuple[str, int, int], int] = {}
    waiting: dict[tuple[str, int, int], int] = {}
    steps: list[_Step] = []
    position = [0] * len(order.ranks)
    able = list(range(len(order.ranks)))
    while able:
        rank = able.pop()
        for action in order.ranks[rank][position[rank] :]:
            wanted = _source(action, place)
            if wanted is not None and wanted not in number:
                waiting[wanted] = rank
                break
            needs = _NONE if wanted is None else number[wanted]
            boundary = _NONE if wanted is None or steps[needs].rank == rank else min(action.stage, wanted[1])
            if action.kind is not Kind.W:
                made = "F" if action.kind is Kind.F else "B", action.stage, action.microbatch or 0
                number[made] = len(steps)
                able += [waiting.pop(made)] if made in waiting else []
            steps.append(_Step(rank, needs, boundary, _KINDS.index(action.kind) * place.num_stages + action.stage))
            position[rank] += 1
    if len(steps) < sum(map(len, order.ranks)):
        simulate(order, Costs.uniform(place.num_stages))  # says where it stands still
    return tuple(steps)


def _source(action: Action, place: Placement) -> tuple[str, int, int] | None:
    """The computation of a neighbouring stage whose result ``action`` needs; what its own rank did is in the rank's list."""
    microbatch = action.microbatch or 0
    if action.kind is Kind.F:
        return ("F", action.stage - 1, microbatch) if action.stage else None
    if action.kind is Kind.W or action.stage == place.num_stages - 1:
        return None
    return "B", action.stage + 1, microbatch


def _pass(steps: tuple[_Step, ...], num_ranks: int, costs: Costs) -> float:
    stages = range(len(costs.forward))
    full = (costs.full_backward(stage) for stage in stages)
    seconds = (*costs.forward, *costs.input_grad, *costs.weight_grad, *full)  # in the order of _KINDS
    lag = [*(costs.boundary_seconds(stage) for stage in stages[:-1]), 0.0]  # the last: nothing is crossed
    free = [0.0] * num_ranks
    ends: list[float] = []
    for rank, needs, boundary, work in steps:
        begin = free[rank]
        if needs >= 0 and (there := ends[needs] + lag[boundary]) > begin:
            begin = there
        free[rank] = end = begin + seconds[work]
        ends.append(end)
    return max(free)
