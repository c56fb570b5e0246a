"""What the beam search (beam.py) counts and times: partial orders, and the numbers that all of them share.

Micro-batches of a pipe are alike, so an operation is told by its kind and its class: class pipe * S + stage is a stage of a pipe,
of which micro-batches come in turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fxchimera.schedule.problem import Problem

__all__ = ["B", "Classes", "F", "Node", "W", "X"]

F, X, W, B = 0, 1, 2, 3  # forward, backward split in two, its second half, whole backward


@dataclass(slots=True, eq=False)
class Node:
    """A partial order.

    Args:
        bounds: What it is judged by, less is better.
        free: By rank, when its last operation ends.
        held: By rank, the memory in use.
        left: By rank, ticks of work to come.
        done: Forwards, backwards, releases done, each by class.
        coming: When the data of forwards, backwards and weight gradients that can come next is there, each by class.
        parent: Of one operation less.
        op: That operation, as (kind, class).
    """

    bounds: tuple[float, float, float]
    free: list[int]
    held: list[float]
    left: list[int]
    done: list[int]
    coming: list[tuple[int, ...]]
    parent: Node | None
    op: tuple[int, int]


class Classes:
    """A problem by class, in ticks.

    Args:
        problem: The problem.
    """

    def __init__(self, problem: Problem) -> None:
        place, costs = problem.placement, problem.costs
        self.problem = problem
        self.stages, self.pipes = place.num_stages, range(len(place.pipes))
        stages = list(range(self.stages)) * len(place.pipes)
        unit = max(*costs.forward, *costs.input_grad, *costs.weight_grad) or 1.0
        self.scale = 10.0 ** (6 - math.floor(math.log10(unit)))
        ahead, back = problem.hops()
        self.rank = [rank for pipe in place.pipes for rank in pipe]
        self.classes = range(len(self.rank))
        self.total = [len(place.microbatches(pipe)) for pipe in self.pipes for _ in range(self.stages)]
        self.first = [stage == 0 for stage in stages]
        self.last = [stage == self.stages - 1 for stage in stages]
        self.down = [tick for pipe in self.pipes for tick in self.ticks([0.0, *ahead[pipe]])]
        self.up = [tick for pipe in self.pipes for tick in self.ticks([*back[pipe], 0.0])]
        forward, first, second = (self.ticks(seconds) for seconds in (costs.forward, costs.input_grad, costs.weight_grad))
        whole = self.ticks([costs.full_backward(stage) for stage in range(self.stages)])
        self.seconds = [[of[stage] for stage in stages] for of in (forward, first, second, whole)]
        halves = [one + two for one, two in zip(first, second, strict=True)]
        least = [min(one, two) for one, two in zip(halves, whole, strict=True)] if problem.split else whole
        self.least = [least[stage] for stage in stages]
        self.back = [min(first[stage], whole[stage]) if problem.split else whole[stage] for stage in stages]
        self.kinds = (X, B) if problem.split and costs.backward else (X,) if problem.split else (B,)
        self.paid = [
            self.seconds[F],
            [one - two for one, two in zip(self.least, self.seconds[W], strict=True)],
            self.seconds[W],
            self.least,
        ]
        self.hold = [problem.holds[stage] for stage in stages]
        self.caps = [cap + 1e-6 for cap in problem.caps]
        self.mine = [[one for one in self.classes if self.rank[one] == rank] for rank in range(place.num_ranks)]
        self.need = problem.least()

    def ticks(self, seconds: list[float] | tuple[float, ...]) -> list[int]:
        """Seconds as integers."""
        return [round(second * self.scale) for second in seconds]
