"""Costs in the search's own unit: a third of what a stage takes on average for one micro-batch.

What the search takes as equal, 1e-9 of its unit, is so a share of the costs, and the order it finds does not depend on the unit in
which seconds are given.

Numbers are rounded to 2^-40 of the unit.  Sums of such numbers are exact up to 8,192 units: what is equal is equal in whatever
order it is added up, and seconds that differ from others by a factor give the same numbers.
"""

from __future__ import annotations

import dataclasses

from fxchimera.schedule.profile import Costs

__all__ = ["scaled", "unpriced"]

_GRID = 2.0**40


def scaled(costs: Costs) -> tuple[Costs, float]:
    """The costs in the search's unit, and that unit in seconds; whole backwards are left out if splitting them costs nothing."""
    stages = range(len(costs.forward))
    unit = sum(costs.forward[stage] + costs.full_backward(stage) for stage in stages) / (3 * len(stages)) or 1.0
    forward, first, second, whole = (
        tuple(round(seconds / unit * _GRID) / _GRID for seconds in of)
        for of in (costs.forward, costs.input_grad, costs.weight_grad, costs.backward)
    )
    if whole and all(abs(one - two - three) <= 4 / _GRID for one, two, three in zip(whole, first, second, strict=True)):
        whole = ()
    own = dataclasses.replace(
        costs,
        forward=forward,
        input_grad=first,
        weight_grad=second,
        backward=whole,
        latency=round(costs.latency / unit * _GRID) / _GRID,
        bytes_per_second=costs.bytes_per_second * unit,
        sync=(),
    )
    return own, unit


def unpriced(costs: Costs) -> Costs:
    """The costs as if splitting a backward cost nothing: its halves take no longer than the whole one."""
    first, second = [], []
    for one, two, whole in zip(costs.input_grad, costs.weight_grad, costs.backward, strict=True):
        share = min(1.0, whole / (one + two)) if one + two else 1.0
        first.append(one * share)
        second.append(two * share)
    return dataclasses.replace(costs, input_grad=tuple(first), weight_grad=tuple(second), backward=())
