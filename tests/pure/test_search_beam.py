"""The beam search and the mirrored half against the checker, the simulator and least makespans by an exact solver."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxchimera.schedule import Costs, Problem, bidirectional, bidirectional_v, interleaved, lower_bound, one_way, v_shape
from fxchimera.schedule.beam import beam
from fxchimera.schedule.fold import fold, folded_plan, unfold
from fxchimera.schedule.moves import Annealing, anneal
from fxchimera.schedule.problem import Plan
from fxchimera.schedule.shop import makespan_of
from tests.pure.test_search_parts import problems, proven


def uneven(depth, latency=0.0):
    return Costs(forward=(1.0,) * depth, input_grad=(1.2,) * depth, weight_grad=(0.8,) * depth, latency=latency)


@given(problems(), st.integers(0, 4))
@settings(max_examples=40, deadline=None)
def test_beam_keeps_every_rule(problem, way):
    """Any placement, costs and caps: what a beam finds is proven, within the memory, and not below the bound."""
    plan, used = beam(problem, 3 * problem.num_cells * 2000, way=way)
    assert used > 0
    if plan is None:  # it looked at no more than a few, and none of them came to an end
        return
    assert problem.fits(plan)
    assert problem.split or all(plan.fused)
    assert lower_bound(problem).seconds <= proven(problem, plan) + 1e-6


@pytest.mark.parametrize(
    ("depth", "number", "latency", "least"),
    [(3, 3, 0.0, 12.6), (3, 3, 0.1, 13.2), (3, 4, 0.0, 15.6), (3, 4, 0.1, 16.2), (3, 6, 0.0, 22.6), (2, 8, 0.1, 24.1)],
)
def test_beam_finds_optima(depth, number, latency, least):
    """Two activations a rank, both directions; the least makespans are an exact solver's (test_search_oracle.py)."""
    problem = Problem.of(bidirectional(depth, number), uneven(depth, latency), peak=2)
    plan, used = beam(problem, 400_000)
    assert used < 600_000
    assert makespan_of(problem, plan) == pytest.approx(least)
    assert beam(problem, 400_000, limit=least)[0] is None


def test_too_small_a_budget_costs_nothing():
    assert beam(Problem.of(bidirectional(4, 8), uneven(4), peak=4), 5000) == (None, 0)


@pytest.mark.parametrize("make", [bidirectional, bidirectional_v])
@pytest.mark.parametrize(("depth", "number"), [(2, 2), (4, 6), (6, 4)])
def test_half_stands_for_the_whole(make, depth, number):
    """Uneven stages: the whole order takes as long as its half, is proven, and its ranks mirror each other."""
    stages = [1.0 + 0.25 * (stage % 3) for stage in range(depth)]
    costs = Costs(forward=tuple(stages), input_grad=tuple(stages[::-1]), weight_grad=(0.75,) * depth, latency=0.25)
    place = make(depth, number)
    problem = Problem.of(place, costs.refined(place.chunks), peak=depth)
    half = fold(problem)
    plan, _ = beam(half, 200_000)
    plan, makespan = anneal(half, plan, Annealing(budget=20_000, hot=0.3, in_turn=True))
    whole = unfold(problem, plan)
    assert proven(problem, whole) == pytest.approx(makespan)
    assert problem.fits(whole)
    assert folded_plan(problem, whole) == plan
    stages = place.num_stages
    for rank, row in enumerate(whole.ranks):
        mirror = whole.ranks[depth - 1 - rank]
        assert [(op // 3 % stages, op % 3) for op in row] == [(op // 3 % stages, op % 3) for op in mirror]


def test_what_has_no_half():
    for place in (one_way(4, 4), v_shape(4, 4), interleaved(4, 2, 4), bidirectional(3, 4), bidirectional(4, 5)):
        assert fold(Problem.of(place, uneven(4 if place.num_ranks == 4 else 3).refined(place.chunks), peak=4)) is None
    assert fold(Problem.of(bidirectional(4, 4), uneven(4), peak=1)) is None
    assert fold(Problem(bidirectional(4, 4), uneven(4), (4.0, 4.0, 4.0, 3.0), (1.0,) * 4)) is None


@given(st.integers(0, 2**30))
@settings(max_examples=10, deadline=None)
def test_in_turn(seed):
    """Micro-batches of a pipe stay in turn at every stage; the makespan is the simulator's."""
    problem = Problem.of(bidirectional(3, 8), uneven(3, 0.1), peak=2)
    plan, _ = beam(problem, 100_000)
    better, makespan = anneal(problem, plan, Annealing(budget=20_000, hot=2.0, in_turn=True, seed=seed))
    assert proven(problem, better) == pytest.approx(makespan)
    assert in_turn(problem, plan)
    assert in_turn(problem, better)


def in_turn(problem: Problem, plan: Plan) -> bool:
    place = problem.placement
    for row in plan.ranks:
        last: dict[tuple[int, int, int], int] = {}
        for op in row:
            microbatch, stage = divmod(op // 3, place.num_stages)
            sort = place.pipe_of[microbatch], stage, op % 3
            if last.get(sort, -1) > microbatch:
                return False
            last[sort] = microbatch
    return True
