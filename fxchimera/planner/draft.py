"""From a model and one micro-batch to a plan: record, cost, cut.  No process is started and nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera.planner.caps import Cap, caps_of
from fxchimera.planner.choose import Memory, choose_cut, sizes_of
from fxchimera.planner.table import Plan
from fxchimera.schedule.order import Order
from fxchimera_passes.capture import capture
from fxchimera_passes.captured import Captured
from fxchimera_passes.cost import NodeCosts, analytic, measured
from fxchimera_passes.plan import StagePlan

__all__ = ["Draft", "draft"]


@dataclass(frozen=True, slots=True)
class Draft:
    """The recording of a model, its cut, and the plan as a user reads it."""

    captured: Captured
    cut: StagePlan
    plan: Plan


def draft(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    order: Order,
    *,
    split_points: Sequence[str] = (),
    cost: str = "analytic",
    memory: Cap | Sequence[Cap] | None = None,
    optimizer_values: float = 2.0,
    agreed: Callable[[NodeCosts], NodeCosts] | None = None,
) -> Draft:
    """Record ``model`` on one micro-batch and cut the recording into the stages of ``order``.

    Args:
        model: the user's model; its parameters may be meta tensors when ``cost`` is "analytic".
        args: positional inputs of one micro-batch.
        kwargs: keyword inputs.
        order: what every rank will do.
        split_points: names of the modules that begin a stage, instead of the automatic cut.
        cost: "analytic" or "measured".
        memory: the most that a rank may need, for all ranks or by rank.
        optimizer_values: numbers that the optimizer keeps for each parameter (AdamW: 2).
        agreed: makes measured costs the same on every rank.

    Raises:
        CaptureError: The model cannot be recorded.
        PartitionError: It cannot be cut into these stages, or not within ``memory``.
        FxChimeraError: ``cost`` or ``memory`` is not understood.
    """
    caps = caps_of(memory, order.placement.num_ranks)
    if cost not in ("analytic", "measured"):
        raise FxChimeraError(f'cost must be "analytic" or "measured", got {cost!r}')
    if cost == "measured" and any(parameter.is_meta for parameter in model.parameters()):
        raise FxChimeraError('cost="measured" needs weights, but some are on the meta device; use cost="analytic"')
    captured = capture(model, args, kwargs, num_stages=order.placement.num_stages, opened=split_points, coarse=True)
    if cost == "measured":
        costs = measured(captured, args, kwargs)
        costs = agreed(costs) if agreed is not None else costs
    else:
        costs = analytic(captured)
    needs = Memory.of(order, sizes_of(captured, optimizer_values=optimizer_values), caps)
    cut = choose_cut(captured, costs, order, split_points, needs)
    return Draft(captured, cut, Plan.of(captured, cut, order, needs.needed(cut.stages), caps))
