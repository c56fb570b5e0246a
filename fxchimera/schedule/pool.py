"""The shapes that a search considers, with their problems and bounds, and the best plans found of each.

All in the search's unit (scale.py); only a result is in seconds again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fxchimera.errors import ScheduleError
from fxchimera.schedule.bounds import lower_bound
from fxchimera.schedule.certificate import certify
from fxchimera.schedule.fold import fold
from fxchimera.schedule.limits import Found, Limits
from fxchimera.schedule.order import Order
from fxchimera.schedule.problem import Plan, Problem
from fxchimera.schedule.profile import Costs
from fxchimera.schedule.scale import scaled
from fxchimera.schedule.shop import NEVER, makespan_of
from fxchimera.schedule.templates import Shape, published, shapes

__all__ = ["Candidate", "Pool"]

_ROUNDING = 1e-12  # of a capacity; less than a byte, for as many as a rank may have
_PUBLISHED = 4  # what making and timing a published order spends on an operation, in operations that the annealing looks at


@dataclass(slots=True)
class Candidate:
    """A plan of a shape."""

    makespan: float
    shape: int
    plan: Plan


class Pool:
    """Everything a search knows.

    Args:
        num_ranks: Ranks D.
        number: Micro-batches N.
        costs: Seconds of D stages, or of 2D: then only of shapes with two chunks a rank.
        limits: What an order may use.
        budget: Operations to look at.
    """

    def __init__(self, num_ranks: int, number: int, costs: Costs, limits: Limits, budget: int) -> None:
        self.num_ranks, self.number, self.given, self.limits, self.budget = num_ranks, number, costs, limits, budget
        self.costs, self.unit = scaled(costs)
        self.shapes: list[Shape] = []
        self.problems: list[Problem] = []
        refused = ScheduleError(
            f"no shape of {[shape.name for shape in shapes(num_ranks, number)]} is within {limits} for {num_ranks} ranks, {number} "
            f"micro-batches and costs of {len(costs.forward)} stages; allow more shapes, or more weight copies"
        )
        for shape in shapes(num_ranks, number):
            if not _allowed(shape, limits) or shape.chunks * num_ranks % len(costs.forward):
                continue
            try:
                problem = self.problem(shape, self.costs)
            except ScheduleError as error:  # too little memory for this shape
                refused = error
                continue
            self.shapes.append(shape)
            self.problems.append(problem)
        if not self.shapes:
            raise refused
        self.halves = [fold(problem) for problem in self.problems]
        self.bounds = [lower_bound(problem) for problem in self.problems]
        self.best: list[list[Candidate]] = [[] for _ in self.shapes]  # by shape, the best few, best first
        self.used = 0

    def problem(self, shape: Shape, costs: Costs) -> Problem:
        """What is asked of a shape, under costs of D stages or of its own.

        Raises:
            ScheduleError: One micro-batch alone needs more memory than there is.
        """
        place, limits = shape.place(self.num_ranks, self.number), self.limits
        own = costs.refined(place.num_stages // len(costs.forward))
        if limits.capacity is None:
            return Problem.of(place, own, peak=limits.peak, split=limits.split)
        held = limits.activation_bytes or ()
        if len(held) != len(costs.forward):
            raise ScheduleError(
                f"capacity is in bytes and needs activation_bytes, one entry a stage: {len(held)} for {len(costs.forward)} stages"
            )
        finer = place.num_stages // len(held)
        holds = tuple(size / finer for size in held for _ in range(finer))
        caps = tuple(cap * (1.0 + _ROUNDING) for cap in limits.capacity)  # what is held is a sum, and may come out a bit larger
        return Problem(place, own, caps, holds, limits.split)

    def known(self, stored: tuple[str, Order] | None) -> Found | None:
        """A stored order as a result, if it is one of this search's shapes, within the limits, and its ranks do not block."""
        names = [shape.name for shape in self.shapes]
        if stored is None or stored[0] not in names:
            return None
        number, order = names.index(stored[0]), stored[1]
        problem = self.problems[number]
        if order.placement != problem.placement or order.is_lowered:
            return None
        plan = problem.plan(order)
        makespan = makespan_of(problem, plan)
        if not problem.fits(plan) or makespan >= NEVER or (any(not fused for fused in plan.fused) and not problem.split):
            return None
        return self.found(number, order, {stored[0]: makespan})

    def found(self, number: int, order: Order, makespans: dict[str, float]) -> Found:
        """An order as a result: in seconds again."""
        problems = [self.problem(shape, self.given) for shape in self.shapes]
        costs = problems[number].costs
        return Found(
            shape=self.shapes[number].name,
            order=order,
            costs=costs,
            certificate=certify(order, costs, split=self.limits.split, problem=problems[number]),
            any_shape=min((lower_bound(problem) for problem in problems), key=lambda bound: bound.seconds),
            compared={name: self.unit * makespan for name, makespan in makespans.items()},
        )

    def least(self, number: int | None = None) -> float:
        """The best makespan so far, of one shape or of all."""
        of = self.best if number is None else [self.best[number]]
        return min((candidates[0].makespan for candidates in of if candidates), default=math.inf)

    def hopeless(self, number: int) -> bool:
        """Whether no order of a shape can be better than the best so far."""
        return self.bounds[number].seconds >= self.least() - 1e-9

    def open(self) -> list[int]:
        """The shapes that may still give something better, the best so far first."""
        may = [number for number in range(len(self.shapes)) if self.shapes[number].listed and not self.hopeless(number)]
        return sorted(may, key=self.least)

    def add(self, number: int, plan: Plan) -> None:
        """Keeps the best few of a shape, without equals."""
        makespan, kept = makespan_of(self.problems[number], plan), self.best[number]
        if makespan < NEVER and all(abs(one.makespan - makespan) > 1e-9 * makespan for one in kept):
            kept.append(Candidate(makespan, number, plan))
            kept.sort(key=lambda one: one.makespan)
            del kept[6:]

    def spent_on_one(self, number: int) -> int:
        """What making and timing a published order of a shape spends."""
        return 3 * self.problems[number].num_cells * _PUBLISHED

    def publish(self) -> None:
        """Adds the published orders that fit, of the shapes with the least bounds first; those of hopeless shapes are not made."""
        for number in sorted(range(len(self.shapes)), key=lambda number: self.bounds[number].seconds):
            if self.hopeless(number):
                continue
            problem = self.problems[number]
            each = self.spent_on_one(number)
            tuned = 8 * each < self.budget
            for order in published(self.shapes[number], self.num_ranks, self.number, problem.costs, tuned=tuned):
                plan = problem.plan(order)
                self.used += each
                if order.placement == problem.placement and (problem.split or all(plan.fused)) and problem.fits(plan):
                    self.add(number, plan)


def _allowed(shape: Shape, limits: Limits) -> bool:
    return shape.copies <= limits.copies and shape.chunks <= limits.chunks and (not limits.shapes or shape.name in limits.shapes)
