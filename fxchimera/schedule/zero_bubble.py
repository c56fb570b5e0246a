"""ZB-H1: 1F1B whose weight gradients wait, so that input gradients reach the earlier ranks sooner (Qi et al., 2024).

Rank r keeps up to r weight gradients open; they fill its waits at the end.  Memory is that of 1F1B's first rank, on every rank.

    D=3, N=3    rank 0   F0 F1 F2 .. .. I0 W0 I1 W1 I2 W2          bubble (D-1)(F+I-W)
                rank 1   .. F0 F1 .. I0 F2 I1 W0 I2 W1 W2          peak activations min(N, D)
                rank 2   .. .. F0 I0 F1 I1 F2 I2 W0 W1 W2
"""

from __future__ import annotations

from collections.abc import Iterator

from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.order import Order
from fxchimera.schedule.placement import one_way

__all__ = ["zb_h1"]


def zb_h1(num_stages: int, n_microbatches: int) -> Order:
    """The ZB-H1 order.

    Raises:
        ScheduleError: A number is below 1.
    """
    placement = one_way(num_stages, n_microbatches)
    return Order("zb-h1", placement, tuple(tuple(_rank(stage, num_stages, n_microbatches)) for stage in range(num_stages)))


def _rank(stage: int, num_stages: int, n_microbatches: int) -> Iterator[Action]:
    warmup = min(num_stages - 1 - stage, n_microbatches)
    for microbatch in range(warmup):
        yield Action(stage, Kind.F, microbatch)
    for microbatch in range(n_microbatches):
        if warmup + microbatch < n_microbatches:
            yield Action(stage, Kind.F, warmup + microbatch)
        yield Action(stage, Kind.I, microbatch)
        if microbatch >= stage:
            yield Action(stage, Kind.W, microbatch - stage)
    for microbatch in range(max(n_microbatches - stage, 0), n_microbatches):
        yield Action(stage, Kind.W, microbatch)
