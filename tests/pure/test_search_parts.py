"""Rules, moves and bounds against what they must keep, on random problems."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxchimera.schedule import (
    Costs,
    Kind,
    Problem,
    bidirectional,
    bidirectional_v,
    check,
    interleaved,
    lower,
    lower_bound,
    mirrored_pairs,
    one_way,
    simulate,
    v_shape,
)
from fxchimera.schedule.listing import Rule, listed
from fxchimera.schedule.moves import Annealing, anneal, fused_where_free
from fxchimera.schedule.shop import makespan_of

PLACEMENTS = st.one_of(
    st.builds(one_way, st.integers(1, 5), st.integers(1, 6)),
    st.builds(v_shape, st.integers(1, 4), st.integers(1, 6)),
    st.builds(bidirectional, st.integers(1, 6), st.integers(1, 7)),
    st.builds(bidirectional_v, st.integers(1, 4), st.integers(1, 6)),
    st.builds(interleaved, st.integers(1, 4), st.integers(1, 3), st.integers(1, 5)),
    st.builds(mirrored_pairs, st.just(4), st.integers(1, 9), st.sampled_from([1, 2])),
)
SECONDS = st.sampled_from([0.0, 0.5, 1.0, 1.1, 2.7])
RULES = st.builds(
    Rule,
    w_from=st.sampled_from([1.0, 0.8, 0.6]),
    shallow=st.booleans(),
    forward_first=st.booleans(),
    wait=st.sampled_from([0.0, 0.5]),
    wait_forward=st.sampled_from([0.0, 0.3]),
    credit=st.sampled_from([None, (1.0, 1.0), (1.5, 2.0)]),
    split=st.sampled_from([None, (0, 0), (1, 1)]),
)


@st.composite
def problems(draw):
    """Any placement, uneven costs, a cap from one micro-batch upwards, splitting with and without a price or not at all."""
    place = draw(PLACEMENTS)
    stages = st.tuples(*[SECONDS] * place.num_stages)
    costs = Costs(
        forward=draw(stages), input_grad=draw(stages), weight_grad=draw(stages), latency=draw(st.sampled_from([0.0, 0.1, 1.5]))
    )
    if draw(st.booleans()):
        costs = costs.with_split_price(draw(st.sampled_from([0.0, 0.1])))
    free = Problem.of(place, costs)
    extra = draw(st.one_of(st.none(), st.integers(0, 4)))
    return Problem.of(place, costs, peak=None if extra is None else max(free.least()) + extra, split=draw(st.booleans()))


def proven(problem, plan):
    """The plan as an order is proven in the strictest mode, within its caps, and simulated to the search's own makespan."""
    order = problem.order(plan, "plan")
    proof = check(lower(order, problem.costs))
    for peak, cap in zip(proof.peak_activations, problem.caps, strict=True):
        assert peak * problem.holds[0] <= cap + 1e-6
    assert problem.plan(order) == plan
    assert problem.split or not any(action.kind in (Kind.I, Kind.W) for _, action in order)
    return simulate(order, problem.costs).makespan


@settings(max_examples=150, deadline=None)
@given(problems(), RULES)
def test_list_rules_never_deadlock(problem, rule):
    plan, makespan = listed(problem, rule)
    assert proven(problem, plan) <= makespan + 1e-6
    assert makespan_of(problem, plan) == pytest.approx(proven(problem, plan))
    assert lower_bound(problem).seconds <= makespan + 1e-6


@settings(max_examples=60, deadline=None)
@given(problems(), RULES, st.integers(0, 2**30))
def test_annealing_keeps_every_rule(problem, rule, seed):
    plan, _ = listed(problem, rule)
    before = makespan_of(problem, plan)
    toggles = 0.3 if problem.split else 0.0
    better, makespan = anneal(problem, plan, Annealing(budget=4000, hot=0.2, toggles=toggles, seed=seed))
    assert makespan <= before
    assert proven(problem, better) == pytest.approx(makespan)
    assert lower_bound(problem).seconds <= makespan + 1e-6
    if problem.split:
        fused, same = fused_where_free(problem, better, 10**9)
        assert same <= makespan + 1e-9
        assert proven(problem, fused) == pytest.approx(same)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("depth", [2, 3, 5, 8])
def test_bound_in_closed_form(depth, chunks, copies):
    """Equal stages, room for everything: (ceil(D/k)-1)(F/v + c) for k copies and v chunks a rank."""
    place = {(1, 1): one_way, (1, 2): bidirectional, (2, 1): v_shape, (2, 2): bidirectional_v}[chunks, copies](depth, 4 * depth)
    costs = Costs.uniform(depth, 1.0, 2.0, latency=0.25).refined(chunks)
    excess = (-(-depth // copies) - 1) * (1 / chunks + 0.25)
    assert lower_bound(Problem.of(place, costs)).seconds == pytest.approx(12 * depth + excess)


@pytest.mark.parametrize(
    ("latency", "peak", "bubble"), [(0.1, 8, 4.6), (0.1, 9, 3.6), (0.05, 8, 4.1), (0.2, 8, 5.6), (0.2, 9, 4.6), (0.1, 10, 3.3)]
)
def test_bounds_of_others(latency, peak, bubble):
    """Bounds that an independent research search printed for D=8, F 1, I 1.2, W 0.8, both directions."""
    costs = Costs(forward=(1.0,) * 8, input_grad=(1.2,) * 8, weight_grad=(0.8,) * 8, latency=latency)
    for number in (16, 32):
        assert lower_bound(Problem.of(bidirectional(8, number), costs, peak=peak)).seconds == pytest.approx(3 * number + bubble)


def test_random_orders_respect_the_bound():
    """A random order of random costs never ends before the bound with the memory that it takes."""
    chance = random.Random(5)
    for _ in range(60):
        depth, number = chance.randint(1, 4), chance.randint(1, 5)
        place = chance.choice([one_way, bidirectional, v_shape, bidirectional_v])(depth, number)
        stages = [tuple(chance.choice([0.0, 0.3, 1.0, 2.0]) for _ in range(place.num_stages)) for _ in range(3)]
        costs = Costs(forward=stages[0], input_grad=stages[1], weight_grad=stages[2], latency=chance.choice([0.0, 0.4]))
        plan, _ = listed(Problem.of(place, costs, peak=None), Rule(w_from=chance.random(), shallow=True))
        problem = Problem.of(place, costs)
        peaks = problem.peaks(plan)
        limited = Problem(
            place, costs, tuple(max(peak, least) for peak, least in zip(peaks, problem.least(), strict=True)), problem.holds
        )
        assert lower_bound(limited).seconds <= makespan_of(problem, plan) + 1e-9


def test_stages_that_cost_nothing_have_an_order():
    """A credit is a share of the period, which is zero when nothing takes time."""
    nothing = Costs(forward=(0.0, 0.0), input_grad=(0.0, 0.0), weight_grad=(0.0, 0.0))
    problem = Problem(one_way(2, 3), nothing, (math.inf, math.inf), (1.0, 1.0), False)
    plan, makespan = listed(problem, Rule(credit=(1.0, 1.0)))
    assert makespan == 0.0
    assert proven(problem, plan) == 0.0
