"""The best order that can be found in a time budget, for any costs, ranks and micro-batches.

    every shape that is allowed      its published orders that fit the cap; list rules (portfolio.py)
    the best few of all              annealed for a short while (moves.py)
    the best of those                annealed with the rest of the budget

A shape whose proven bound is above what was found already is left out, and the search ends early when a bound is reached.  As the
published orders take part, the result is never worse than any of them within the same limits.

The budget is counted in operations looked at, a million of which take about a second of one core; so the result depends on the
arguments alone, not on the machine, its load or Python's hash seed.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

from fxchimera.errors import ScheduleError
from fxchimera.schedule.bounds import lower_bound
from fxchimera.schedule.cache import cache_folder, key_of, load, store
from fxchimera.schedule.certificate import certify
from fxchimera.schedule.limits import Found, Limits
from fxchimera.schedule.listing import listed
from fxchimera.schedule.moves import Annealing, anneal, fused_where_free
from fxchimera.schedule.order import Order
from fxchimera.schedule.portfolio import trials
from fxchimera.schedule.problem import Plan, Problem
from fxchimera.schedule.profile import Costs
from fxchimera.schedule.shop import NEVER, makespan_of
from fxchimera.schedule.templates import Shape, published, shapes

__all__ = ["auto"]

_PER_SECOND = 1_200_000  # operations that the annealing looks at in a second
_LISTED = 4  # what a list rule spends on an operation, in those units
_LEAST = 2000  # an annealing below that is not worth its start
_DEFAULT_SECONDS, _THOROUGH_SECONDS = 1.0, 30.0
# Rounds of annealing: how many plans, the share of the remaining budget for each, the first temperature, and whether to begin
# again from what rules and papers gave instead of what was annealed so far.
_DEFAULT = ((6, 0.06, 0.03, False), (2, 0.25, 0.03, False), (1, 1.0, 0.03, False))
# Little memory or few operations: good orders are far from each other, so many hot starts.
_WIDE = (
    (6, 0.03, 0.03, False),
    *((6, 0.03, hot, True) for hot in (0.3, 1.0, 3.0, 10.0)),
    (2, 0.2, 0.1, False),
    (1, 1.0, 0.03, False),
)
_THOROUGH = (
    (6, 0.03, 0.03, True),
    (6, 0.04, 0.1, True),
    (4, 0.06, 0.3, True),
    (4, 0.1, 0.1, False),
    (2, 0.25, 0.03, False),
    (1, 1.0, 0.03, False),
)


@dataclass(slots=True)
class _Candidate:
    """A plan of a shape."""

    makespan: float
    shape: int
    plan: Plan
    name: str


def auto(
    num_ranks: int,
    n_microbatches: int,
    costs: Costs,
    limits: Limits | None = None,
    *,
    search: str = "default",
    seconds: float | None = None,
    seed: int = 0,
    cache: bool | Path = True,
) -> Found:
    """The best order found for given costs.

    Args:
        num_ranks: Ranks D.
        n_microbatches: Micro-batches N of a step.
        costs: Seconds of D stages; shapes with two chunks a rank take every stage as two equal ones.
        limits: Memory, copies of the weights, chunks, and whether backwards may be split; :class:`Limits`' defaults when None.
        search: ``"default"`` (about a second) or ``"thorough"`` (about half a minute).
        seconds: The budget in seconds of one core, instead of the level's.
        seed: Of the random part.
        cache: Whether a thorough search's order is kept on disk (cache.py), or in which folder.

    Raises:
        ScheduleError: The numbers do not fit each other, or no order fits into the limits.
    """
    if search not in ("default", "thorough"):
        raise ScheduleError(f'search must be "default" or "thorough", got {search!r}')
    if len(costs.forward) != num_ranks:
        raise ScheduleError(f"the costs cover {len(costs.forward)} stages, and there are {num_ranks} ranks; give one entry a rank")
    given = seconds if seconds is not None else _DEFAULT_SECONDS if search == "default" else _THOROUGH_SECONDS
    run = _Search(num_ranks, n_microbatches, costs, limits or Limits(), int(given * _PER_SECOND), seed)
    run.thorough = search == "thorough"
    return run.cached(costs, cache) if run.thorough and cache else run.go()


class _Search:
    """State of one search."""

    def __init__(self, num_ranks: int, number: int, costs: Costs, limits: Limits, budget: int, seed: int) -> None:
        self.num_ranks, self.number, self.limits, self.budget, self.seed = num_ranks, number, limits, budget, seed
        self.shapes: list[Shape] = []
        self.costs: list[Costs] = []
        self.problems: list[Problem] = []
        refused = ScheduleError(f"no shape of {[shape.name for shape in shapes(num_ranks, number)]} is within {limits}")
        for shape in shapes(num_ranks, number):
            if not _allowed(shape, limits):
                continue
            own = costs.refined(shape.chunks)
            try:
                problem = self.problem(shape, own)
            except ScheduleError as error:  # too little memory for this shape
                refused = error
                continue
            self.shapes.append(shape)
            self.costs.append(own)
            self.problems.append(problem)
        if not self.shapes:
            raise refused
        self.bounds = [lower_bound(problem) for problem in self.problems]
        self.best: list[list[_Candidate]] = [[] for _ in self.shapes]  # by shape, the best few, best first
        self.trials = [trials(problem, seed) for problem in self.problems]
        self.used, self.thorough = 0, False

    def problem(self, shape: Shape, costs: Costs) -> Problem:
        place, limits = shape.place(self.num_ranks, self.number), self.limits
        if limits.capacity is None:
            return Problem.of(place, costs, peak=limits.peak, split=limits.split)
        if limits.activation_bytes is None or len(limits.activation_bytes) != self.num_ranks:
            raise ScheduleError("capacity is in bytes and needs activation_bytes, one entry a stage")
        holds = tuple(size / shape.chunks for size in limits.activation_bytes for _ in range(shape.chunks))
        return Problem(place, costs, limits.capacity, holds, limits.split)

    def go(self) -> Found:
        for number in range(len(self.shapes)):
            self.publish(number)
        for share, keep in ((0.1, len(self.shapes)), (0.25, 2)):
            chosen = sorted(self.open(), key=lambda number: self.best[number][0].makespan if self.best[number] else math.inf)[:keep]
            for number in sorted(chosen):
                self.list_rules(number, int(share * self.budget / len(chosen)))
        self.shorten()
        found = [candidates[0] for candidates in self.best if candidates]
        if not found:
            raise ScheduleError(f"no order of {self.num_ranks} ranks and {self.number} micro-batches fits into {self.limits}")
        winner = min(found, key=lambda candidate: (candidate.makespan - 1e-12 * candidate.makespan, candidate.shape))
        problem = self.problems[winner.shape]
        plan = fused_where_free(problem, winner.plan, self.budget // 10)[0] if problem.split else winner.plan
        order = problem.order(plan, "auto")
        return self.found(winner.shape, order, {self.shapes[one.shape].name: one.makespan for one in found})

    def cached(self, costs: Costs, cache: bool | Path) -> Found:
        """The stored result, or a new one, stored."""
        folder = cache if isinstance(cache, Path) else cache_folder()
        key = key_of(costs, self.num_ranks, self.number, self.limits, self.budget, self.seed)
        found = self.known(load(folder, key))
        if found is None:
            found = self.go()
            store(folder, key, found.shape, found.order)
        return found

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

    def found(self, number: int, order: Order, compared: dict[str, float]) -> Found:
        costs = self.costs[number]
        return Found(
            shape=self.shapes[number].name,
            order=order,
            costs=costs,
            certificate=certify(order, costs, split=self.limits.split, problem=self.problems[number]),
            any_shape=min(self.bounds, key=lambda bound: bound.seconds),
            compared=compared,
        )

    def least(self) -> float:
        """The best makespan so far."""
        return min((candidates[0].makespan for candidates in self.best if candidates), default=math.inf)

    def open(self) -> list[int]:
        """The shapes that may still give something better."""
        least = self.least()
        return [number for number, bound in enumerate(self.bounds) if self.shapes[number].listed and bound.seconds < least - 1e-9]

    def add(self, number: int, plan: Plan, makespan: float, name: str) -> None:
        """Keeps the best few of a shape, without equals."""
        kept = self.best[number]
        if all(abs(one.makespan - makespan) > 1e-9 * makespan for one in kept):
            kept.append(_Candidate(makespan, number, plan, name))
            kept.sort(key=lambda one: one.makespan)
            del kept[6:]

    def publish(self, number: int) -> None:
        problem = self.problems[number]
        for order in published(self.shapes[number], self.num_ranks, self.number, self.costs[number]):
            plan = problem.plan(order)
            if order.placement == problem.placement and (problem.split or all(plan.fused)) and problem.fits(plan):
                self.add(number, plan, makespan_of(problem, plan), order.name)

    def list_rules(self, number: int, budget: int) -> None:
        """Tries rules until the budget is used or the bound is reached; goes on where an earlier call stopped."""
        problem, floor = self.problems[number], self.bounds[number].seconds
        each = 3 * problem.num_cells * _LISTED
        for trial in itertools.islice(self.trials[number], 4 + budget // each):
            plan, _ = listed(trial.shown(problem), trial.rule)
            self.used += each
            self.add(number, plan, makespan_of(problem, plan), "list rule")
            if self.best[number][0].makespan <= floor + 1e-9:
                break

    def shorten(self) -> None:
        """Anneals the best few plans briefly, fewer of them for longer, then the best one with what is left."""
        starts = [list(candidates) for candidates in self.best]
        for number, (keep, share, hot, anew) in enumerate(self.rounds()):
            pool = starts if anew else self.best
            wanted = [one for shape in self.open() for one in pool[shape][: max(3, keep // len(self.open()))]]
            wanted.sort(key=lambda one: (one.makespan, one.shape))
            left = self.budget - self.used
            for turn, one in enumerate(wanted[:keep]):
                if left * share >= _LEAST:
                    self.anneal(one, int(left * share), hot, 100 * number + turn)

    def rounds(self) -> tuple[tuple[int, float, float, bool], ...]:
        """The rounds of annealing for this size and memory."""
        fewest = min(3 * problem.num_cells for problem in self.problems)
        room = self.problems[0].placement.num_ranks * max(self.problems[0].holds)
        tight = min(self.problems[0].caps) < room - 1e-6
        if tight or self.budget > 20_000 * fewest:
            return _WIDE
        return _THOROUGH if self.thorough else _DEFAULT

    def anneal(self, one: _Candidate, budget: int, hot: float, turn: int) -> None:
        problem = self.problems[one.shape]
        priced = bool(problem.costs.backward)
        how = Annealing(
            budget=budget,
            hot=hot,
            toggles=0.15 if problem.split and priced else 0.0,
            floor=self.bounds[one.shape].seconds,
            seed=self.seed + turn,
        )
        plan = one.plan if priced or not problem.split else divided(one.plan)
        plan, makespan = anneal(problem, plan, how)
        self.used += budget
        self.add(one.shape, plan, makespan, f"{one.name}, annealed")


def divided(plan: Plan) -> Plan:
    """The plan with every backward split, its W at once after its I: never later where splitting costs nothing."""
    ranks = [[new for op in row for new in ((op, op + 1) if op % 3 == 1 and plan.fused[op // 3] else (op,))] for row in plan.ranks]
    return Plan(ranks, [False] * len(plan.fused))


def _allowed(shape: Shape, limits: Limits) -> bool:
    return shape.copies <= limits.copies and shape.chunks <= limits.chunks and (not limits.shapes or shape.name in limits.shapes)
