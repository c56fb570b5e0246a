"""From a model and one micro-batch to a plan: record, cost, cut, order.  No process is started and nothing is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxchimera.errors import FxChimeraError, PartitionError
from fxchimera.planner.caps import Cap, caps_of
from fxchimera.planner.choose import Memory, choose_cut, sizes_of
from fxchimera.planner.joint import Joint
from fxchimera.planner.link import Measures
from fxchimera.planner.memory import Sizes
from fxchimera.planner.pace import step_seconds
from fxchimera.planner.relief import AUTO, Recompute, Relief, reliefs, understood
from fxchimera.planner.table import Plan
from fxchimera.schedule.mirrors import sync_edges
from fxchimera.schedule.order import Order
from fxchimera.schedule.placement import one_way
from fxchimera_passes.capture import capture
from fxchimera_passes.captured import Captured
from fxchimera_passes.cost import NodeCosts, analytic, measured
from fxchimera_passes.deferrable import with_deferrable
from fxchimera_passes.plan import StagePlan
from fxchimera_passes.points import Place, modules_of

__all__ = ["Auto", "Draft", "arrange", "draft"]


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
    """The recording of a model, what its nodes cost, its cut, the order of a step, and the plan as a user reads it."""

    captured: Captured
    costs: NodeCosts
    cut: StagePlan
    order: Order
    plan: Plan


def draft(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    order: Order | Auto,
    *,
    split_points: Sequence[Place] = (),
    cost: str = "analytic",
    memory: Cap | Sequence[Cap] | None = None,
    optimizer_values: float = 2.0,
    agreed: Callable[[NodeCosts], NodeCosts] | None = None,
    threads: bool = False,
    recompute: Recompute = AUTO,
    device: torch.device | None = None,
    whole: bool = False,
    closed: Sequence[str] = (),
) -> Draft:
    """Record ``model`` on one micro-batch and cut the recording into the stages of ``order``.

    Args:
        model: the user's model; its parameters may be meta tensors when ``cost`` is "analytic".
        args: positional inputs of one micro-batch.
        kwargs: keyword inputs.
        order: what every rank will do, or that it is to be searched, together with the cut.
        split_points: where stages begin (names of modules); else where the forward is marked; else the automatic cut.
        cost: "analytic" or "measured".
        memory: the most that a rank may need, for all ranks or by rank.
        optimizer_values: numbers that the optimizer keeps for each parameter (AdamW: 2).
        agreed: makes measured costs the same on every rank.
        threads: the ranks are threads of one process, so that measured costs go with fast messages.
        recompute: how much stages compute again in the backward; "auto" is what ends soonest within ``memory``.
        device: what the model is recorded for, if not the device that it is on.
        whole: no backward can be split (stages are compiled).
        closed: names of modules that are kept whole.

    Raises:
        CaptureError: The model cannot be recorded.
        PartitionError: It cannot be cut into these stages, or not within ``memory``.
        FxChimeraError: ``cost``, ``memory`` or ``recompute`` is not understood.
    """
    num_ranks, num_stages = (order.num_ranks,) * 2 if isinstance(order, Auto) else _size(order)
    caps_of(memory, num_ranks)  # refused before the model is recorded
    understood(recompute)
    if cost not in ("analytic", "measured"):
        raise FxChimeraError(f'cost must be "analytic" or "measured", got {cost!r}')
    absent = [name for name, parameter in model.named_parameters() if parameter.is_meta] if cost == "measured" else []
    if absent:
        raise FxChimeraError(
            f'cost="measured" needs weights, but {len(absent)} parameters are on the meta device ({absent[0]!r} first); use '
            'cost="analytic"'
        )
    points = modules_of(split_points)
    captured = capture(model, args, kwargs, num_stages=num_stages, closed=closed, opened=points, device=device, coarse=True)
    if cost == "measured":
        costs = measured(captured, args, kwargs)
        costs = agreed(costs) if agreed is not None else costs
    else:
        costs = analytic(captured)
    return arrange(
        captured,
        NodeCosts(costs.forward, costs.backward, {}) if whole else with_deferrable(captured, costs),
        order,
        split_points=split_points,
        memory=memory,
        optimizer_values=optimizer_values,
        measures=Measures.usual(cost, captured.device.type, threads=threads),
        recompute=recompute,
    )


def arrange(
    captured: Captured,
    costs: NodeCosts,
    order: Order | Auto,
    *,
    split_points: Sequence[Place] = (),
    memory: Cap | Sequence[Cap] | None = None,
    optimizer_values: float = 2.0,
    measures: Measures | None = None,
    recompute: Recompute = AUTO,
) -> Draft:
    """Cut a recording whose nodes cost ``costs``, and settle the order; the rest is as in :func:`draft`.

    Raises:
        PartitionError: It cannot be cut into these stages, or not within ``memory``.
        FxChimeraError: ``memory`` or ``recompute`` is not understood.
    """
    caps = caps_of(memory, order.num_ranks if isinstance(order, Auto) else order.placement.num_ranks)
    sizes = sizes_of(captured, optimizer_values=optimizer_values)
    known = measures or Measures()
    one = order.num_ranks == 1 if isinstance(order, Auto) else order.placement.num_stages == 1
    places = split_points or (() if one else captured.marks)

    def arranged(relief: Relief | None) -> Draft:
        if isinstance(order, Auto):
            return _searched(captured, costs, order, places, sizes, caps, known, relief)
        return _cut(captured, costs, order, places, sizes, caps, known, relief)

    *others, last = reliefs(recompute, captured, costs, capped=bool(caps))
    found = []
    for relief in others:
        with contextlib.suppress(PartitionError):  # the last has the most room
            found.append(arranged(relief))
    return min((*found, arranged(last)), key=lambda made: step_seconds(made.order, made.plan.costs))


def _size(order: Order) -> tuple[int, int]:
    return order.placement.num_ranks, order.placement.num_stages


def _cut(
    captured: Captured,
    costs: NodeCosts,
    order: Order,
    split_points: Sequence[Place],
    sizes: Sizes,
    caps: tuple[int, ...],
    known: Measures,
    relief: Relief | None,
) -> Draft:
    """Plan the cut for an order."""
    needs = Memory.of(order, sizes, caps)
    cut = choose_cut(captured, costs, order, split_points, needs, known, relief=relief)
    sync = sync_edges(cut, order.placement, sizes.parameters)
    plan = Plan.of(captured, cut, order, needs.needed(cut.stages), caps, measures=known, sync=sync)
    return Draft(captured, costs, cut, order, plan)


def _searched(
    captured: Captured,
    costs: NodeCosts,
    wanted: Auto,
    split_points: Sequence[Place],
    sizes: Sizes,
    caps: tuple[int, ...],
    measures: Measures,
    relief: Relief | None,
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
        measures=measures,
        relief=relief,
    ).choose()
    memory = Memory.of(found.order, sizes, caps).needed(found.cut.stages)
    plan = Plan.of(captured, found.cut, found.order, memory, caps, found.problem, measures, found.sync)
    return Draft(captured, costs, found.cut, found.order, plan)
