"""List rules to try, the most promising first: what auto.py runs before it anneals.

A rule does not have to see the true costs.  Under latency, the orders that the rules make for *free* communication and then run
with the true latency are far better than those made with it: a greedy choice that waits for messages drifts out of the periodic
order that free communication gives (bidirectional, D=8, N=16, F 1, I 1.2, W 0.8, latency 0.1, 8 activations: bubble 4.9 against
27).  So a trial is a rule and the costs that it is shown.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from fxchimera.schedule.listing import Rule
from fxchimera.schedule.problem import Problem
from fxchimera.schedule.profile import Costs

__all__ = ["Trial", "trials"]

_NEAR = (0.8, 0.9, 1.0, 1.1, 1.2)
_FIXED = ((1.0, (1.0, 1.0, 1.0)), (0.9, (1.0, 1.0, 1.0)), (1.0, (1.0, 0.9, 1.1)), (0.6, (1.0, 1.0, 1.0)))
_CREDITS = ((1.0, 1.0), (1.0, 2.0), (1.5, 1.0), (1.5, 2.0), (2.0, 1.0), (2.0, 2.0))


@dataclass(frozen=True, slots=True)
class Trial:
    """A rule, and the costs that it is shown.

    Args:
        rule: How a free rank chooses.
        latency: Share of the true message seconds.
        stretch: Factors of the true F, I and W.
        even: Every stage costs the mean.
    """

    rule: Rule
    latency: float = 0.0
    stretch: tuple[float, float, float] = (1.0, 1.0, 1.0)
    even: bool = False

    def shown(self, problem: Problem) -> Problem:
        """The problem with the costs that the rule is shown."""
        costs = problem.costs
        forward, first, second = (
            tuple(factor * second for second in (_mean(stages) if self.even else stages))
            for factor, stages in zip(self.stretch, (costs.forward, costs.input_grad, costs.weight_grad), strict=True)
        )
        whole = costs.backward and (_mean(costs.backward) if self.even else costs.backward)
        shown = dataclasses.replace(
            costs,
            forward=forward,
            input_grad=first,
            weight_grad=second,
            backward=whole,
            latency=self.latency * costs.latency,
            bytes_per_second=costs.bytes_per_second / self.latency if self.latency else float("inf"),
        )
        return dataclasses.replace(problem, costs=shown)


def trials(problem: Problem, seed: int) -> Iterator[Trial]:
    """Trials without end: a fixed list, then random ones."""
    tight = min(problem.caps) < problem.placement.num_ranks * max(problem.holds) * problem.placement.chunks - 1e-6
    priced = problem.split and bool(problem.costs.backward)
    uneven = len(set(zip(problem.costs.forward, problem.costs.input_grad, strict=True))) > 1
    half = max(1, problem.placement.num_ranks // 2)
    windows = ((0, 0), (half, half), (0, half), None) if priced else (None,)
    choices = itertools.product(_FIXED, (False, True), (False, True), windows, (False, True) if uneven else (False,))
    for (w_from, stretch), forward_first, shallow, window, even in choices:
        rule = Rule(w_from=w_from, shallow=shallow, forward_first=forward_first, split=window)
        yield Trial(rule, stretch=stretch, even=even)
    chance = random.Random(seed)
    while True:
        yield _random(chance, problem.costs, tight=tight, priced=priced, uneven=uneven)


def _random(chance: random.Random, costs: Costs, *, tight: bool, priced: bool, uneven: bool) -> Trial:
    """One random trial; what cannot matter stays at its default."""
    pick = chance.choice
    plain = chance.random() < 0.5
    rule = Rule(
        w_from=pick((1.0, 0.99, 0.9, 0.8, 0.6)),
        shallow=pick((False, True)),
        forward_first=pick((False, True)),
        wait=pick((0.0, 0.0, 0.5, 1.0)),
        wait_forward=pick((0.0, 0.0, 0.1, 0.3)),
        credit=pick(_CREDITS) if chance.random() < (0.8 if tight else 0.35) else None,
        lead=pick((None, 0.5, -0.5, -1.5)),
        split=(pick(range(12)), pick(range(12))) if priced and chance.random() < 0.7 else None,
    )
    slow = costs.latency > 0.0 or bool(costs.boundary_bytes)
    return Trial(
        rule,
        latency=pick((0.0, 0.0, 0.25, 0.5, 0.75, 1.0)) if slow else 0.0,
        stretch=(1.0, 1.0, 1.0) if plain else (pick(_NEAR), pick(_NEAR), pick(_NEAR)),
        even=uneven and pick((False, True)),
    )


def _mean(stages: tuple[float, ...]) -> tuple[float, ...]:
    return (sum(stages) / len(stages),) * len(stages)
