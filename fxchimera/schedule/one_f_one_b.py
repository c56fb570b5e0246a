"""1F1B: as GPipe, but a rank runs a backward as soon as it can (PipeDream-flush, DAPPLE).

rank 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3    bubble (D-1)(F+B), whatever N
rank 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..    peak activations min(N, D-r) on rank r
rank 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..
"""

from __future__ import annotations

from collections.abc import Iterator

from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.order import Order
from fxchimera.schedule.placement import one_way

__all__ = ["one_f_one_b"]


def one_f_one_b(num_stages: int, n_microbatches: int) -> Order:
    """The 1F1B order: rank r warms up with D-1-r forwards, then alternates F and B, then drains.

    Raises:
        ScheduleError: A number is below 1.
    """
    placement = one_way(num_stages, n_microbatches)
    return Order("1f1b", placement, tuple(tuple(_rank(stage, num_stages, n_microbatches)) for stage in range(num_stages)))


def _rank(stage: int, num_stages: int, n_microbatches: int) -> Iterator[Action]:
    warmup = min(num_stages - 1 - stage, n_microbatches)
    for microbatch in range(warmup):
        yield Action(stage, Kind.F, microbatch)
    for microbatch in range(n_microbatches):
        if warmup + microbatch < n_microbatches:
            yield Action(stage, Kind.F, warmup + microbatch)
        yield Action(stage, Kind.B, microbatch)
