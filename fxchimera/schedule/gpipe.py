"""GPipe: every rank runs all its forwards, then all its backwards (Huang et al., 2019).

rank 0  F0 F1 F2 .. .. .. .. B0 B1 B2          bubble (D-1)(F+B), whatever N
rank 1  .. F0 F1 F2 .. .. B0 B1 B2 ..          peak activations N on every rank
rank 2  .. .. F0 F1 F2 B0 B1 B2 .. ..
"""

from __future__ import annotations

from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.order import Order
from fxchimera.schedule.placement import one_way

__all__ = ["gpipe"]


def gpipe(num_stages: int, n_microbatches: int) -> Order:
    """The GPipe order, backwards in the order of the forwards.

    Raises:
        ScheduleError: A number is below 1.
    """
    placement = one_way(num_stages, n_microbatches)
    ranks = (
        tuple(Action(stage, kind, microbatch) for kind in (Kind.F, Kind.B) for microbatch in range(n_microbatches))
        for stage in range(num_stages)
    )
    return Order("gpipe", placement, tuple(ranks))
