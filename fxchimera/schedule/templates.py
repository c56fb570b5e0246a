"""The shapes that the search considers, and the published orders of each, under given costs.

shape               chunks   copies   published orders
one-way             1        1        gpipe, 1f1b, zb-h1
interleaved         2        1        interleaved-1f1b
v                   2        1        zbv, v-half, dualpipev
bidirectional       1        2        chimera (direct, doubling, halving), continuous, dualpipe
bidirectional-v     2        2        none
two-pairs           1        4        chimera-4
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fxchimera.errors import ScheduleError
from fxchimera.schedule.families import make_order
from fxchimera.schedule.order import Order
from fxchimera.schedule.placement import (
    Placement,
    bidirectional,
    bidirectional_v,
    interleaved,
    mirrored_pairs,
    one_way,
    v_shape,
)
from fxchimera.schedule.profile import Costs
from fxchimera.schedule.zbv import zbv

__all__ = ["Shape", "published", "shapes"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A placement by name.

    Args:
        name: For people and for ``shapes=``.
        chunks: Stages of a pipe on a rank.
        copies: Copies of the weights.
        place: The placement from ranks and micro-batches.
        families: Published orders of this placement.
        listed: Whether list rules are tried too; not where another shape is better at the same price.
    """

    name: str
    chunks: int
    copies: int
    place: Callable[[int, int], Placement]
    families: tuple[str, ...]
    listed: bool = True


def shapes(num_ranks: int, n_microbatches: int) -> tuple[Shape, ...]:
    """The shapes for a number of ranks and micro-batches, those with few chunks and copies first."""
    found = [Shape("one-way", 1, 1, one_way, ("gpipe", "1f1b", "zb-h1"))]
    if num_ranks == 1:
        return tuple(found)
    if n_microbatches > 1:
        families = ("chimera", "chimera-doubling", "chimera-halving", "continuous", "dualpipe")
        found.append(Shape("bidirectional", 1, 2, bidirectional, families))
    found.append(Shape("v", 2, 1, v_shape, ("zbv", "v-half", "dualpipev")))
    found.append(
        Shape("interleaved", 2, 1, lambda ranks, number: interleaved(ranks, 2, number), ("interleaved-1f1b",), listed=False)
    )
    if n_microbatches > 1:
        found.append(Shape("bidirectional-v", 2, 2, bidirectional_v, ()))
    if num_ranks % 4 == 0 and n_microbatches > 2:
        found.append(Shape("two-pairs", 1, 4, lambda ranks, number: mirrored_pairs(ranks, number, 2), ("chimera-4",)))
    return tuple(found)


def published(shape: Shape, num_ranks: int, n_microbatches: int, costs: Costs, *, tuned: bool = True) -> Iterator[Order]:
    """The published orders of a shape that exist for these numbers.

    Args:
        shape: The shape.
        num_ranks: Ranks D.
        n_microbatches: Micro-batches N.
        costs: One entry for every stage of the shape's placement.
        tuned: Whether ZBV is also made for the mean costs.
    """
    for name in shape.families:
        try:
            yield make_order(name, num_ranks, n_microbatches)
        except ScheduleError:
            continue
        if name == "zbv" and tuned:
            mean = [sum(seconds) / len(seconds) for seconds in (costs.forward, costs.input_grad, costs.weight_grad)]
            yield zbv(num_ranks, n_microbatches, mean, costs.latency)
