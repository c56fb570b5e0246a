"""One run of the search for the best order: its budget, its rounds.  What it does is told in auto.py."""

from __future__ import annotations

import itertools
import math

from fxchimera.schedule.beam import beam
from fxchimera.schedule.fold import folded_plan, unfold
from fxchimera.schedule.limits import Found, Limits
from fxchimera.schedule.listing import listed
from fxchimera.schedule.moves import Annealing, anneal, fused_where_free
from fxchimera.schedule.pool import Candidate, Pool
from fxchimera.schedule.portfolio import trials
from fxchimera.schedule.problem import Plan
from fxchimera.schedule.profile import Costs
from fxchimera.schedule.rounds import DEFAULT, THOROUGH, WIDE, Round
from fxchimera.schedule.scale import unpriced
from fxchimera.schedule.shop import NEVER, makespan_of

__all__ = ["Search"]

_LISTED = 4  # what a list rule spends on an operation, in operations that the annealing looks at
_STARTED = 4  # what the start of an annealing spends on one
_LEAST = 2000  # an annealing below that is not worth its start


class Search(Pool):
    """State of one search.

    Args:
        num_ranks: Ranks D.
        number: Micro-batches N.
        costs: Seconds of D stages.
        limits: What an order may use.
        budget: Operations to look at.
        seed: Of the random part.
        thorough: Whether there is time for many starts.
        unpriced_first: Whether it begins with what a search finds to which splitting costs nothing; None: yes, but a ``thorough``
            one tries both ways.
    """

    def __init__(
        self,
        num_ranks: int,
        number: int,
        costs: Costs,
        limits: Limits,
        budget: int,
        seed: int,
        *,
        thorough: bool = False,
        unpriced_first: bool | None = None,
    ) -> None:
        super().__init__(num_ranks, number, costs, limits, budget)
        self.seed, self.thorough = seed, thorough
        self.priced = limits.split and bool(self.costs.backward)
        self.both_ways = self.priced and thorough and unpriced_first is None
        self.unpriced_first = self.priced and not self.both_ways and unpriced_first is not False
        self.whole: list[dict[int, Candidate]] = [{} for _ in self.shapes]  # by shape and window, with few backwards split
        self.trials = [trials(problem, seed) for problem in self.problems]

    def go(self) -> Found:
        """The search."""
        number, plan = self.run()
        order = self.problems[number].order(plan, "auto")
        makespans = {self.shapes[one.shape].name: one.makespan for one in self._tops()}
        return self.found(number, order, makespans)

    def run(self) -> tuple[int, Plan]:
        """The shape and the plan of the best order."""
        self.publish()
        if self.unpriced_first:
            self._forget_the_price()
        left = self.budget - self.used
        for share, keep in ((0.06, len(self.shapes)), (0.06, 2)) if self._wide() else ((0.1, len(self.shapes)), (0.15, 2)):
            chosen = self.open()[:keep]
            for number in sorted(chosen, key=lambda number: self.bounds[number].seconds):
                if not self.hopeless(number):
                    self._list_rules(number, int(share * left / len(chosen)))
        self._build()
        self._divide()
        self._shorten()
        if self.both_ways:
            self._the_other_way()
        found = self._tops()
        assert found, "a rule finds an order of every shape that has room for one micro-batch"
        winner = min(found, key=lambda one: (one.makespan - 1e-12 * one.makespan, one.shape))
        problem = self.problems[winner.shape]
        if problem.split and 60 * problem.num_cells * _STARTED < self.budget:
            return winner.shape, fused_where_free(problem, winner.plan, self.budget // 10)[0]
        return winner.shape, winner.plan

    def _tops(self) -> list[Candidate]:
        """The best of every shape that has one."""
        return [candidates[0] for candidates in self.best if candidates]

    def _forget_the_price(self) -> None:
        """Adds what a search finds to which splitting costs nothing, and the best of it with backwards whole where that pays.

        Small prices make the search's ground rough, and good orders are near the ones without a price.
        """
        budget = int(unpriced_share(self.costs) * self.budget)
        if budget < 16 * self.spent_on_one(0):
            return  # no time for more than the published orders, which take part anyway
        free = Search(self.num_ranks, self.number, unpriced(self.given), self.limits, budget, self.seed, thorough=self.thorough)
        number, plan = free.run()
        for one in free._tops():
            self.add(one.shape, one.plan)
        self.add(number, plan)
        self.add(number, fused_where_free(self.problems[number], plan, self.budget // 20, anywhere=True)[0])
        self.used += free.used + self.budget // 20

    def _the_other_way(self) -> None:
        """Adds what a search as long as this one finds that begins without the price, and so stays near such orders."""
        other = Search(
            self.num_ranks, self.number, self.given, self.limits, self.budget, self.seed, thorough=True, unpriced_first=True
        )
        number, plan = other.run()
        for one in other._tops():
            self.add(one.shape, one.plan)
        self.add(number, plan)

    def _list_rules(self, number: int, budget: int) -> None:
        """Tries rules until the budget is used or the bound is reached; goes on where an earlier call stopped."""
        problem, floor = self.problems[number], self.bounds[number].seconds
        each = 3 * problem.num_cells * _LISTED
        spare = int(1.25 * self.budget) - self.used
        few = max(int(self.least() == math.inf), min(3, spare // (2 * each)))
        for trial in itertools.islice(self.trials[number], max(few, budget // each)):
            plan, _ = listed(trial.shown(problem), trial.rule)
            self.used += each
            self.add(number, plan)
            if trial.rule.split is not None and trial.rule.split[0] == 0 and problem.costs.backward:
                one, known = Candidate(makespan_of(problem, plan), number, plan), self.whole[number]
                if one.makespan < known.get(trial.rule.split[1], one).makespan or trial.rule.split[1] not in known:
                    known[trial.rule.split[1]] = one
            if self.least(number) <= floor + 1e-9:
                break

    def _build(self) -> None:
        """Beams for the shapes that may still be best, mirrored where that is possible, and without mirroring where it is cheap."""
        wide = self._wide()
        if self.number > self.num_ranks and not wide and not self.thorough:
            return  # a narrow beam drifts out of the periodic order that rules give to many micro-batches
        chosen = self.open()[: 3 if wide or self.thorough else 2]
        share = (self.budget - self.used) // max(1, len(chosen))
        for number in chosen:
            problem, half = self.problems[number], self.halves[number]
            left = int((0.7 if wide else 0.25) * share)
            if wide and half is not None:
                left -= self._start_hot(number, left // 2)
            for way, part in enumerate((0.25, 0.8, 0.4, 0.5, 1.0) if wide or self.thorough else (1.0,)):
                if self.least() <= self.bounds[number].seconds + 1e-9:
                    break
                plan, used = beam(half or problem, int(part * left), limit=self.least(), way=way)
                self.used += used
                left -= used
                if plan is not None:
                    self.add(number, plan if half is None else unfold(problem, plan))

    def _start_hot(self, number: int, budget: int) -> int:
        """A beam without mirroring, and what annealing makes of it: where memory is scarce the best order may have no mirror."""
        problem, before = self.problems[number], self.used
        plan, used = beam(problem, budget // 4)
        self.used += used
        if plan is not None:
            self.add(number, plan)
            for turn, hot in enumerate((1.0, 2.0, 1.0)):
                one = Candidate(makespan_of(problem, plan), number, plan)
                self._anneal(one, budget // 4, Round(1, 1.0, hot, whole=True), 1000 + turn)
        return self.used - before

    def _divide(self) -> None:
        """Anneals orders with few split backwards, bad as they are: where a split has a price, splitting as needed ends lower.

        Only with several chunks a rank: with one, the rules' best is as good a start.
        """
        open_ = [number for number in self.open() if self.shapes[number].chunks > 1]
        starts = [one for number in open_[:1] for _, one in sorted(self.whole[number].items())[:2]]
        left = self.budget - self.used
        for turn, one in enumerate(starts):
            self._anneal(one, int(0.75 * left / len(starts)), Round(1, 1.0, 0.15, toggles=0.3), 2000 + turn)

    def _shorten(self) -> None:
        """Anneals the best few plans briefly, fewer of them for longer, then the best one with what is left."""
        starts = [list(candidates) for candidates in self.best]
        for number, how in enumerate(WIDE if self._wide() else THOROUGH if self.thorough else DEFAULT):
            pool, open_ = starts if how.anew else self.best, self.open()
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

    def _anneal(self, one: Candidate, budget: int, how: Round, turn: int) -> None:
        problem, half, plan = self.problems[one.shape], self.halves[one.shape], one.plan
        start = 3 * problem.num_cells * _STARTED
        if budget < 2 * start:
            return
        priced = bool(problem.costs.backward)
        settings = Annealing(
            budget=budget - start,
            hot=how.hot,
            toggles=how.toggles if problem.split and priced else 0.0,
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
                self.add(one.shape, unfold(problem, anneal(half, mirrored, settings)[0]))
                return
        self.add(one.shape, anneal(problem, plan, settings)[0])


def unpriced_share(costs: Costs) -> float:
    """Share of the budget for the search in which splitting a backward costs nothing: the more, the lower the price is."""
    stages = zip(costs.input_grad, costs.weight_grad, costs.backward, strict=True)
    price = max(((one + two) / whole - 1.0 for one, two, whole in stages if whole), default=1.0)
    return min(0.75, max(0.2, 0.75 - 11.0 * price))


def divided(plan: Plan) -> Plan:
    """The plan with every backward split, its W at once after its I: never later where splitting costs nothing."""
    ranks = [[new for op in row for new in ((op, op + 1) if op % 3 == 1 and plan.fused[op // 3] else (op,))] for row in plan.ranks]
    return Plan(ranks, [False] * len(plan.fused))
