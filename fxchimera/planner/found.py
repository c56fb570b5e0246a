"""What a search for a plan finds on its way: orders for given costs, and what a cut with an order would take."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from fxchimera.planner.ascending import ascending
from fxchimera.planner.link import Measures
from fxchimera.planner.memory import Sizes
from fxchimera.planner.pace import step_seconds
from fxchimera.planner.table import costs_of
from fxchimera.schedule.auto import auto
from fxchimera.schedule.limits import Limits
from fxchimera.schedule.mirrors import sync_edges
from fxchimera.schedule.order import Order
from fxchimera.schedule.problem import Problem
from fxchimera.schedule.profile import Costs, SyncEdge
from fxchimera_passes.plan import StagePlan

__all__ = ["Choice", "searched"]


@dataclass(frozen=True, slots=True)
class Choice:
    """A cut, an order for its stages, the limits that it was searched in, and the problem that they make with the costs.

    ``seconds`` is what a step takes, the exchange between mirrors and owners included.
    """

    cut: StagePlan
    order: Order
    limits: Limits
    problem: Problem
    seconds: float

    @classmethod
    def of(cls, cut: StagePlan, order: Order, limits: Limits, measures: Measures, sizes: Sizes) -> Choice:
        """Predict what a step takes."""
        costs = costs_of(cut.stages, measures, sync_edges(cut, order.placement, sizes.parameters))
        problem = Problem.of(order.placement, costs, peak=limits.peak)
        if limits.capacity is not None and limits.activation_bytes is not None:
            problem = Problem(order.placement, costs, limits.capacity, limits.activation_bytes)
        return cls(cut, order, limits, problem, step_seconds(order, costs))

    @property
    def sync(self) -> tuple[SyncEdge, ...]:
        """What mirrors and owners exchange."""
        return self.problem.costs.sync


@functools.lru_cache(maxsize=256)
def searched(num_ranks: int, n_microbatches: int, costs: Costs, limits: Limits, seconds: float) -> Order:
    """The order that a search of about so many seconds finds, with every stage's micro-batches in turn.

    The result depends on the arguments alone, so it is kept: a model that is wrapped again is planned at once.

    Raises:
        ScheduleError: None fits into the limits.
    """
    return ascending(auto(num_ranks, n_microbatches, costs, limits, seconds=seconds).order)
