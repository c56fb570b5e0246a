"""The orders a user can ask for by name."""

from __future__ import annotations

from collections.abc import Callable

from fxchimera.errors import ScheduleError
from fxchimera.schedule.action import Kind
from fxchimera.schedule.chimera import chimera
from fxchimera.schedule.gpipe import gpipe
from fxchimera.schedule.one_f_one_b import one_f_one_b
from fxchimera.schedule.order import Order

__all__ = ["forward_only", "make_order", "schedules"]

_BACKWARD = (Kind.B, Kind.I, Kind.W, Kind.SEND_B, Kind.RECV_B, Kind.SEND_G, Kind.RECV_G)


def schedules() -> dict[str, Callable[[int, int], Order]]:
    """The families by name: each takes the numbers of stages and of micro-batches."""
    return {"gpipe": gpipe, "1f1b": one_f_one_b, "chimera": chimera}


def make_order(schedule: str, num_stages: int, n_microbatches: int) -> Order:
    """The compute-only order of a family, by name (upper or lower case).

    With one stage every family is the same: forward and backward of one micro-batch after the other.

    Raises:
        ScheduleError: The name is unknown, a number is below 1, or the family refuses the number of stages.
    """
    known = schedules()
    name = schedule.lower()
    if name not in known:
        raise ScheduleError(f"unknown schedule {schedule!r}; the schedules are {', '.join(map(repr, known))}")
    if num_stages == 1:
        plain = one_f_one_b(1, n_microbatches)
        return Order(name, plain.placement, plain.ranks)
    return known[name](num_stages, n_microbatches)


def forward_only(order: Order) -> Order:
    """The forwards of an order, in the same order: for evaluation.  Of a lowered order the refresh of the mirrors stays too."""
    ranks = (tuple(action for action in actions if action.kind not in _BACKWARD) for actions in order.ranks)
    return Order(f"{order.name} forward", order.placement, tuple(ranks))
