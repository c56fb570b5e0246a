"""From a model and one micro-batch to a plan: record, cost, cut, order.  No process is started and nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera.planner.caps import Cap, caps_of
from fxchimera.planner.choose import Memory, choose_cut, sizes_of
from fxchimera.planner.joint import Joint
from fxchimera.planner.memory import Sizes
from fxchimera.planner.table import Plan
from fxchimera.schedule.order import Order
from fxchimera.schedule.placement import one_way
from fxchimera_passes.capture import capture
from fxchimera_passes.captured import Captured
from fxchimera_passes.cost import NodeCosts, analytic, measured
from fxchimera_passes.plan import StagePlan

__all__ = ["Auto", "Draft", "draft"]


@dataclass(frozen=True, slots=True)
class Auto:
    """Asks for the best order that can be found, instead of a given one.

    Args:
        num_ranks: Ranks D.
        n_microbatches: Micro-batches N.
        two_copies: Whether a recorded model may have two copies of each stage.

    Raises:
        ScheduleError: A number is below 1.
    """

    num_ranks: int
    n_microbatches: int
    two_copies: Callable[[Captured], bool]

    def __post_init__(self) -> None:
        one_way(self.num_ranks, self.n_microbatches)


@dataclass(frozen=True, slots=True)
class Draft:
    """The recording of a model, its cut, the order of a step, and the plan as a user reads it."""

    captured: Captured
    cut: StagePlan
    order: Order
    plan: Plan


def draft(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    order: Order | Auto,
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
        order: what every rank will do, or that it is to be searched, together with the cut.
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
    num_ranks, num_stages = (order.num_ranks,) * 2 if isinstance(order, Auto) else _size(order)
    caps = caps_of(memory, num_ranks)
    if cost not in ("analytic", "measured"):
        raise FxChimeraError(f'cost must be "analytic" or "measured", got {cost!r}')
    if cost == "measured" and any(parameter.is_meta for parameter in model.parameters()):
        raise FxChimeraError('cost="measured" needs weights, but some are on the meta device; use cost="analytic"')
    captured = capture(model, args, kwargs, num_stages=num_stages, opened=split_points, coarse=True)
    if cost == "measured":
        costs = measured(captured, args, kwargs)
        costs = agreed(costs) if agreed is not None else costs
    else:
        costs = analytic(captured)
    sizes = sizes_of(captured, optimizer_values=optimizer_values)
    if isinstance(order, Auto):
        return _searched(captured, costs, order, split_points, sizes, caps)
    needs = Memory.of(order, sizes, caps)
    cut = choose_cut(captured, costs, order, split_points, needs)
    return Draft(captured, cut, order, Plan.of(captured, cut, order, needs.needed(cut.stages), caps))


def _size(order: Order) -> tuple[int, int]:
    return order.placement.num_ranks, order.placement.num_stages


def _searched(
    captured: Captured, costs: NodeCosts, wanted: Auto, split_points: Sequence[str], sizes: Sizes, caps: tuple[int, ...]
) -> Draft:
    """Plan the cut and the order together."""
    found = Joint(
        captured=captured,
        costs=costs,
        num_ranks=wanted.num_ranks,
        n_microbatches=wanted.n_microbatches,
        copies=2 if wanted.two_copies(captured) else 1,
        split_points=split_points,
        sizes=sizes,
        caps=caps,
    ).choose()
    memory = Memory.of(found.order, sizes, caps).needed(found.cut.stages)
    return Draft(captured, found.cut, found.order, Plan.of(captured, found.cut, found.order, memory, caps, found.problem))
