"""Read an order whose placement nobody gave: the forwards tell where every stage of every micro-batch runs.

    0F0,0F1,...      line 0 is rank 0: stage 0 of micro-batch 0 is there
    1F0,...          micro-batches with the same ranks, stage by stage, form one pipe

Two pipes are named down and up in the order of their first micro-batch.
"""

from __future__ import annotations

from fxchimera.errors import ScheduleError
from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.order import Order, read_csv
from fxchimera.schedule.placement import Placement, one_way

__all__ = ["read_order"]


def read_order(text: str, name: str = "csv") -> Order:
    """An order from its CSV alone, one line a rank, as :meth:`Order.to_csv` and torch write it.

    Raises:
        ScheduleError: A cell is no action, or a forward is missing or there twice.
    """
    lines = [line for line in text.splitlines() if line.strip(", \t")]
    if not lines:
        raise ScheduleError(f"{name} holds no actions; write one line a rank, for instance 0F0,0B0")
    loose = read_csv("\n".join(lines) + "\n", one_way(len(lines), 1), name)
    where: dict[tuple[int, int], int] = {}
    for rank, action in loose:
        if action.kind is Kind.F and action.microbatch is not None:
            cell = action.microbatch, action.stage
            if cell in where:
                raise ScheduleError(f"{name}: {action} is there twice, on rank {where[cell]} and on rank {rank}")
            where[cell] = rank
    if not where:
        raise ScheduleError(f"{name} holds no forward, so nothing tells where the stages are")
    return Order(name, _placement(where, name), loose.ranks)


def _placement(where: dict[tuple[int, int], int], name: str) -> Placement:
    """The pipes that the forwards show."""
    number, stages = 1 + max(cell[0] for cell in where), 1 + max(cell[1] for cell in where)
    pipes: dict[tuple[int, ...], int] = {}
    pipe_of = []
    for microbatch in range(number):
        missing = [stage for stage in range(stages) if (microbatch, stage) not in where]
        if missing:
            raise ScheduleError(f"{name}: {Action(missing[0], Kind.F, microbatch)} is missing on every rank")
        ranks = tuple(where[microbatch, stage] for stage in range(stages))
        pipe_of.append(pipes.setdefault(ranks, len(pipes)))
    return Placement(stages, tuple(pipes), tuple(pipe_of))
