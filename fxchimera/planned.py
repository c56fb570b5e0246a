"""What a call of the user's becomes before anything runs: the order asked for, and the model recorded, cut and planned for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from torch import nn

from fxchimera.errors import CoarseCutWarning, ScheduleError
from fxchimera.planner.caps import Cap
from fxchimera.planner.draft import Auto, Draft, draft
from fxchimera.planner.idle import idle
from fxchimera.planner.relief import Recompute
from fxchimera.planner.table import Plan
from fxchimera.runtime.batches.copies import allows_two_copies
from fxchimera.runtime.microbatch import Batch
from fxchimera.runtime.processes.world import World
from fxchimera.runtime.stages.compiled import Compiler, warn_compiled
from fxchimera.runtime.stages.program import Programs
from fxchimera.runtime.steps.feed import all_on
from fxchimera.runtime.weights.materialise import named_attributes
from fxchimera.schedule.families import make_order
from fxchimera.schedule.order import Order
from fxchimera_passes.points import Place

__all__ = ["Schedule", "order_of", "planned"]

Schedule = str | Order | Callable[[int, int], Order]


def order_of(schedule: Schedule, num_stages: int, n_microbatches: int, *, copied: bool = True) -> Order | Auto:
    """The order that a user names, gives or makes, or that it is to be searched, with two copies of a stage only if ``copied``.

    Raises:
        ScheduleError: The schedule is unknown, or for another number of ranks or micro-batches.
    """
    if isinstance(schedule, str) and schedule.lower() == "auto":
        return Auto(num_stages, n_microbatches, lambda captured: copied and allows_two_copies(captured, n_microbatches))
    if isinstance(schedule, str):
        order = make_order(schedule, num_stages, n_microbatches)
    else:
        order = schedule if isinstance(schedule, Order) else schedule(num_stages, n_microbatches)
    found = (order.placement.num_ranks, order.placement.n_microbatches)
    if found != (num_stages, n_microbatches):
        raise ScheduleError(
            f"the order {order.name!r} is for {found[0]} ranks and {found[1]} micro-batches, but the pipeline has "
            f"num_stages={num_stages}, n_microbatches={n_microbatches}"
        )
    return order


def planned(
    model: nn.Module,
    batch: Batch,
    order: Order | Auto,
    split_points: Sequence[Place],
    cost: str,
    world: World | None,
    memory: Cap | Sequence[Cap] | None = None,
    optimizer_values: float = 2.0,
    recompute: Recompute = "none",
    settled: Callable[[Draft], Draft] | None = None,
    compiler: Compiler | None = None,
    blocks: Sequence[str] | None = None,
) -> tuple[Programs, Plan]:
    """Record the first micro-batch, cut the recording and settle the order; with measured costs every rank uses rank 0's.

    With ``blocks``, modules that stay whole, backwards are not split.
    """
    whole = compiler is not None or blocks is not None
    example = batch.microbatches[0]
    device = None if world is None else world.devices.first
    shown = all_on(device, model, example) if cost == "measured" else example
    with named_attributes(model):
        made = draft(
            model,
            shown.args,
            shown.kwargs,
            order,
            split_points=split_points,
            cost=cost,
            memory=memory,
            optimizer_values=optimizer_values,
            agreed=None if world is None else lambda costs: world.spread(costs, "pipeline()"),
            threads=world is None or world.num_processes == 1,
            recompute="none" if whole else recompute,
            device=device,
            whole=whole,
            closed=blocks or (),
        )
    if settled is not None:
        made = settled(made)
    warn_compiled(model, compiler)
    for note in made.captured.report.notes:
        warnings.warn(note, stacklevel=3)
    for note in made.cut.notes:
        warnings.warn(f"{note} {idle(made.cut, made.order)}", CoarseCutWarning, stacklevel=3)
    return Programs(made.captured, made.cut, example, compiler), made.plan
