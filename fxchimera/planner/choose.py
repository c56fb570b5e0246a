"""Choose the cut of a captured model for a given order: by the simulated makespan, not by the balance alone."""

from __future__ import annotations

from collections.abc import Sequence

from fxchimera.planner.table import costs_of
from fxchimera.schedule.order import Order
from fxchimera.schedule.simulate import simulate
from fxchimera_passes.captured import Captured
from fxchimera_passes.cost import NodeCosts
from fxchimera_passes.plan import Stage, StagePlan
from fxchimera_passes.stages import make_plan

__all__ = ["choose_cut"]


def choose_cut(captured: Captured, costs: NodeCosts, order: Order, split_points: Sequence[str]) -> StagePlan:
    """Cut ``captured`` into the order's stages so that the order ends soonest.

    Raises:
        PartitionError: The graph has too few places to cut, or a stage would own no parameter.
    """

    def makespan(stages: Sequence[Stage]) -> float:
        return simulate(order, costs_of(stages)).makespan

    return make_plan(captured, costs, order.placement.num_stages, split_points=split_points, score=makespan)
