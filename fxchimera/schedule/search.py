"""One run of the search for the best order: its candidates, its budget, its rounds.  What it does is told in auto.py."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from fxchimera.errors import ScheduleError
from fxchimera.schedule.beam import beam
from fxchimera.schedule.bounds import lower_bound
from fxchimera.schedule.certificate import certify
from fxchimera.schedule.fold import fold, folded_plan, unfold
from fxchimera.schedule.limits import Found, Limits
from fxchimera.schedule.listing import listed
from fxchimera.schedule.moves import Annealing, anneal, fused_where_free
from fxchimera.schedule.order import Order
from fxchimera.schedule.portfolio import trials
from fxchimera.schedule.problem import Plan, Problem
from fxchimera.schedule.profile import Costs
from fxchimera.schedule.rounds import DEFAULT, THOROUGH, WIDE, Round
from fxchimera.schedule.shop import NEVER, makespan_of
from fxchimera.schedule.templates import Shape, published, shapes

__all__ = ["Search"]

_LISTED = 4  # what a list rule spends on an operation, in operations that the annealing looks at
_LEAST = 2000  # an annealing below that is not worth its start


@dataclass(slots=True)
class _Candidate:
    """A plan of a shape."""

    makespan: float
    shape: int
    plan: Plan


class Search:
    """State of one search.

    Args:
        num_ranks: Ranks D.
        number: Micro-batches N.
        costs: Seconds of D stages.
        limits: What an order may use.
        budget: Operations to look at.
        seed: Of the random part.
        thorough: Whether there is time for many starts.
    """

    def __init__(
        self, num_ranks: int, number: int, costs: Costs, limits: Limits, budget: int, seed: int, *, thorough: bool = False
    ) -> None:
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
                problem = self._problem(shape, own)
            except ScheduleError as error:  # too little memory for this shape
                refused = error
                continue
            self.shapes.append(shape)
            self.costs.append(own)
            self.problems.append(problem)
        if not self.shapes:
            raise refused
        self.halves = [fold(problem) for problem in self.problems]
        self.bounds = [lower_bound(problem) for problem in self.problems]
        self.best: list[list[_Candidate]] = [[] for _ in self.shapes]  # by shape, the best few, best first
        self.whole: list[dict[int, _Candidate]] = [{} for _ in self.shapes]  # by shape and window, with few backwards split
        self.trials = [trials(problem, seed) for problem in self.problems]
        self.used, self.thorough = 0, thorough

    def _problem(self, shape: Shape, costs: Costs) -> Problem:
        place, limits = shape.place(self.num_ranks, self.number), self.limits
        if limits.capacity is None:
            return Problem.of(place, costs, peak=limits.peak, split=limits.split)
        if limits.activation_bytes is None or len(limits.activation_bytes) != self.num_ranks:
            raise ScheduleError("capacity is in bytes and needs activation_bytes, one entry a stage")
        holds = tuple(size / shape.chunks for size in limits.activation_bytes for _ in range(shape.chunks))
        return Problem(place, costs, limits.capacity, holds, limits.split)

    def go(self) -> Found:
        """The search.

        Raises:
            ScheduleError: Nothing fits into the limits.
        """
        for number in range(len(self.shapes)):
            self._publish(number)
        for share, keep in ((0.06, len(self.shapes)), (0.06, 2)) if self._wide() else ((0.1, len(self.shapes)), (0.15, 2)):
            chosen = self._open()[:keep]
            for number in sorted(chosen):
                self._list_rules(number, int(share * self.budget / len(chosen)))
        self._build()
        self._divide()
        self._shorten()
        found = [candidates[0] for candidates in self.best if candidates]
        if not found:
            raise ScheduleError(f"no order of {self.num_ranks} ranks and {self.number} micro-batches fits into {self.limits}")
        winner = min(found, key=lambda candidate: (candidate.makespan - 1e-12 * candidate.makespan, candidate.shape))
        problem = self.problems[winner.shape]
        plan = fused_where_free(problem, winner.plan, self.budget // 10)[0] if problem.split else winner.plan
        order = problem.order(plan, "auto")
        return self._found(winner.shape, order, {self.shapes[one.shape].name: one.makespan for one in found})

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
        return self._found(number, order, {stored[0]: makespan})

    def _found(self, number: int, order: Order, compared: dict[str, float]) -> Found:
        costs = self.costs[number]
        return Found(
            shape=self.shapes[number].name,
            order=order,
            costs=costs,
            certificate=certify(order, costs, split=self.limits.split, problem=self.problems[number]),
            any_shape=min(self.bounds, key=lambda bound: bound.seconds),
            compared=compared,
        )

    def _least(self, number: int | None = None) -> float:
        """The best makespan so far, of one shape or of all."""
        of = self.best if number is None else [self.best[number]]
        return min((candidates[0].makespan for candidates in of if candidates), default=math.inf)

    def _open(self) -> list[int]:
        """The shapes that may still give something better, the best so far first."""
        least = self._least()
        may = [number for number, bound in enumerate(self.bounds) if self.shapes[number].listed and bound.seconds < least - 1e-9]
        return sorted(may, key=self._least)

    def _add(self, number: int, plan: Plan) -> None:
        """Keeps the best few of a shape, without equals."""
        makespan, kept = makespan_of(self.problems[number], plan), self.best[number]
        if makespan < NEVER and all(abs(one.makespan - makespan) > 1e-9 * makespan for one in kept):
            kept.append(_Candidate(makespan, number, plan))
            kept.sort(key=lambda one: one.makespan)
            del kept[6:]

    def _publish(self, number: int) -> None:
        problem = self.problems[number]
        for order in published(self.shapes[number], self.num_ranks, self.number, self.costs[number]):
            plan = problem.plan(order)
            if order.placement == problem.placement and (problem.split or all(plan.fused)) and problem.fits(plan):
                self._add(number, plan)

    def _list_rules(self, number: int, budget: int) -> None:
        """Tries rules until the budget is used or the bound is reached; goes on where an earlier call stopped."""
        problem, floor = self.problems[number], self.bounds[number].seconds
        each = 3 * problem.num_cells * _LISTED
        for trial in itertools.islice(self.trials[number], max(3, budget // each)):
            plan, _ = listed(trial.shown(problem), trial.rule)
            self.used += each
            self._add(number, plan)
            if trial.rule.split is not None and trial.rule.split[0] == 0 and problem.costs.backward:
                one, known = _Candidate(makespan_of(problem, plan), number, plan), self.whole[number]
                if one.makespan < known.get(trial.rule.split[1], one).makespan or trial.rule.split[1] not in known:
                    known[trial.rule.split[1]] = one
            if self.best[number][0].makespan <= floor + 1e-9:
                break

    def _build(self) -> None:
        """Beams for the shapes that may still be best, mirrored where that is possible, and without mirroring where it is cheap."""
        wide = self._wide()
        if self.number > self.num_ranks and not wide and not self.thorough:
            return  # a narrow beam drifts out of the periodic order that rules give to many micro-batches
        chosen = self._open()[: 3 if wide or self.thorough else 2]
        share = (self.budget - self.used) // max(1, len(chosen))
        for number in chosen:
            problem, half = self.problems[number], self.halves[number]
            left = int((0.7 if wide else 0.25) * share)
            if wide and half is not None:
                left -= self._start_hot(number, left // 2)
            for way, part in enumerate((0.25, 0.8, 0.4, 0.5, 1.0) if wide or self.thorough else (1.0,)):
                if self._least() <= self.bounds[number].seconds + 1e-9:
                    break
                plan, used = beam(half or problem, int(part * left), limit=self._least(), way=way)
                self.used += used
                left -= used
                if plan is not None:
                    self._add(number, plan if half is None else unfold(problem, plan))

    def _start_hot(self, number: int, budget: int) -> int:
        """A beam without mirroring, and what annealing makes of it: where memory is scarce the best order may have no mirror."""
        problem, before = self.problems[number], self.used
        plan, used = beam(problem, budget // 4)
        self.used += used
        if plan is not None:
            self._add(number, plan)
            for turn, hot in enumerate((1.0, 2.0, 1.0)):
                one = _Candidate(makespan_of(problem, plan), number, plan)
                self._anneal(one, budget // 4, Round(1, 1.0, hot, whole=True), 1000 + turn)
        return self.used - before

    def _divide(self) -> None:
        """Anneals orders with few split backwards, bad as they are: where a split has a price, splitting as needed ends lower.

        Only with several chunks a rank: with one, the rules' best is as good a start.
        """
        open_ = [number for number in self._open() if self.shapes[number].chunks > 1]
        starts = [one for number in open_[:1] for _, one in sorted(self.whole[number].items())[:2]]
        left = self.budget - self.used
        for turn, one in enumerate(starts):
            self._anneal(one, int(0.5 * left / len(starts)), Round(1, 1.0, 0.15), 2000 + turn)

    def _shorten(self) -> None:
        """Anneals the best few plans briefly, fewer of them for longer, then the best one with what is left."""
        starts = [list(candidates) for candidates in self.best]
        for number, how in enumerate(WIDE if self._wide() else THOROUGH if self.thorough else DEFAULT):
            pool, open_ = starts if how.anew else self.best, self._open()
            wanted = [one for shape in open_ for one in pool[shape][: max(3, how.keep // len(open_))]]
            wanted.sort(key=lambda one: (one.makespan, one.shape))
            left = self.budget - self.used
            for turn, one in enumerate(wanted[: how.keep]):
                if left * how.share >= _LEAST:
                    self._anneal(one, int(left * how.share), how, 100 * number + turn)

    def _wide(self) -> bool:
        """Whether there is little memory, or there are few operations for the budget."""
        fewest = min(3 * problem.num_cells for problem in self.problems)
        room = self.problems[0].placement.num_ranks * max(self.problems[0].holds)
        return min(self.problems[0].caps) < room - 1e-6 or self.budget > 20_000 * fewest

    def _anneal(self, one: _Candidate, budget: int, how: Round, turn: int) -> None:
        problem, half, plan = self.problems[one.shape], self.halves[one.shape], one.plan
        priced = bool(problem.costs.backward)
        settings = Annealing(
            budget=budget,
            hot=how.hot,
            toggles=0.15 if problem.split and priced else 0.0,
            in_turn=self._wide(),
            floor=self.bounds[one.shape].seconds,
            seed=self.seed + turn,
        )
        if problem.split and not priced:
            plan = divided(plan)
        self.used += budget
        if half is not None and not how.whole:
            mirrored = folded_plan(problem, plan)
            if makespan_of(half, mirrored) < NEVER:
                self._add(one.shape, unfold(problem, anneal(half, mirrored, settings)[0]))
                return
        self._add(one.shape, anneal(problem, plan, settings)[0])


def divided(plan: Plan) -> Plan:
    """The plan with every backward split, its W at once after its I: never later where splitting costs nothing."""
    ranks = [[new for op in row for new in ((op, op + 1) if op % 3 == 1 and plan.fused[op // 3] else (op,))] for row in plan.ranks]
    return Plan(ranks, [False] * len(plan.fused))


def _allowed(shape: Shape, limits: Limits) -> bool:
    return shape.copies <= limits.copies and shape.chunks <= limits.chunks and (not limits.shapes or shape.name in limits.shapes)
