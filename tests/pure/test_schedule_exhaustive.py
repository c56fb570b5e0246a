"""Every family and the search's orders, for all stage and micro-batch counts: proven in the strictest mode, and executed.

The default run takes a spread of cells, ``-m matrix`` all of D in {1, 2, 3, 4, 6, 8, 16} and N in 1..64.
"""

from __future__ import annotations

import random

import pytest

from fxchimera.errors import ScheduleError
from fxchimera.schedule import (
    Costs,
    Kind,
    Limits,
    Problem,
    SyncEdge,
    auto,
    bidirectional,
    bidirectional_v,
    check,
    forward_only,
    lower,
    make_order,
    one_way,
    schedules,
    v_shape,
)
from fxchimera.schedule.listing import Rule, listed
from tests.pure.test_schedule_oracle import Executor, mutate, refused

DEPTHS = (1, 2, 3, 4, 6, 8, 16)
SHAPES = {"one-way": one_way, "v": v_shape, "bidirectional": bidirectional, "bidirectional-v": bidirectional_v}
EVEN_ONLY = ("chimera", "chimera-doubling", "chimera-halving")


def refuses(name, depth, number):
    """Whether a family says that it does not exist for these numbers; the rules are the published ones."""
    if depth == 1:
        return False
    if name in EVEN_ONLY:
        return depth % 2 == 1
    if name == "chimera-4":
        return depth % 4 != 0
    if name == "dualpipe":
        return depth % 2 == 1 or number % 2 == 1 or number < 2 * depth
    return name == "dualpipev" and number < 2 * depth


def edges(place):
    """Every mirror with its owner, the first pipe's rank."""
    found = set()
    for stage in range(place.num_stages):
        owner = place.pipes[0][stage]
        found |= {SyncEdge(stage, ranks[stage], owner) for ranks in place.pipes if ranks[stage] != owner}
    return tuple(sorted(found, key=lambda edge: (edge.stage, edge.mirror)))


def family(name, depth, number):
    """One cell of one family: there or refused, all computations, proven with its exchange."""
    try:
        order = make_order(name, depth, number)
    except ScheduleError:
        assert refuses(name, depth, number), (name, depth, number)
        return None
    assert not refuses(name, depth, number), (name, depth, number)
    sync = edges(order.placement)
    check(lower(order, sync=sync), sync=sync)
    return order


def rules(shape, depth, number):
    """One cell of the list rules: with a cap of D and of the least that one micro-batch needs."""
    place = SHAPES[shape](depth, number)
    costs = Costs.uniform(depth, latency=0.1).refined(place.chunks)
    for peak in (depth, 1):
        problem = Problem.of(place, costs, peak=peak)
        plan, _ = listed(problem, Rule(forward_first=number % 2 == 0, shallow=number % 3 == 0))
        proof = check(lower(problem.order(plan, "rule"), costs), slots=[peak * place.chunks] * place.num_ranks)
        assert max(proof.peak_activations) <= peak * place.chunks


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", sorted(schedules()))
def test_families(name, depth):
    for number in (1, depth, 2 * depth + 1, 33) if depth < 16 else (15, 32):
        family(name, depth, number)


@pytest.mark.matrix
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", sorted(schedules()))
def test_all_families(name, depth):
    for number in range(1, 65):
        family(name, depth, number)


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_rules(shape):
    for depth, number in ((1, 3), (2, 5), (3, 8), (4, 1), (6, 13), (8, 20), (16, 17)):
        rules(shape, depth, number)


@pytest.mark.matrix
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_all_rules(shape, depth):
    for number in range(1, 65):
        rules(shape, depth, number)


@pytest.mark.matrix
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("depth", [*DEPTHS, 5, 7, 12])
def test_all_searches(depth):
    """A short search for every N: within its cap, proven, at or above its bound."""
    for number in range(1, 65):
        costs = Costs(forward=(1.0,) * depth, input_grad=(1.2,) * depth, weight_grad=(0.8,) * depth, latency=0.1)
        found = auto(depth, number, costs, Limits(peak=depth), seconds=0.05)
        place = found.order.placement
        check(lower(found.order, found.costs), slots=[depth * place.chunks] * place.num_ranks)
        assert found.certificate.makespan >= found.certificate.lower_bound - 1e-9


def executed(order, chance):
    """The order with messages ends in random interleavings, and mutants are refused if and only if they fail there."""
    sync = edges(order.placement)
    for one, forward in ((order, False), (forward_only(order), True)):
        lowered = lower(one, sync=sync)
        assert Executor(lowered, sync, forward=forward).run(chance) == ""
        for _ in range(8):
            kind, mutant = mutate(lowered, chance)
            fault = Executor(mutant, sync, forward=mutant.is_forward_only).run(chance)
            assert bool(fault) == bool(refused(mutant, sync)), (order.name, kind, fault, refused(mutant, sync))


@pytest.mark.parametrize("name", sorted(schedules()))
def test_families_run(name):
    chance = random.Random(name)
    for depth, number in ((2, 5), (3, 4), (4, 8), (4, 9), (6, 12)):
        if not refuses(name, depth, number):
            executed(make_order(name, depth, number), chance)


def test_searches_run():
    chance = random.Random(11)
    for depth, number in ((2, 3), (3, 5), (4, 6), (5, 4)):
        for chunks in (1, 2):
            for split in (False, True):
                costs = Costs.uniform(depth, latency=0.2).with_split_price(0.05)
                limits = Limits(peak=depth, chunks=chunks, split=split)
                executed(auto(depth, number, costs, limits, seconds=0.02).order, chance)


@pytest.mark.matrix
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", sorted(schedules()))
def test_many_mutants(name):
    """Some thousand mutants a family."""
    chance = random.Random(name)
    for _ in range(15):
        for depth, number in ((2, 5), (3, 4), (4, 8), (4, 9), (6, 12), (8, 16)):
            if not refuses(name, depth, number):
                executed(make_order(name, depth, number), chance)


def test_caps_are_reached():
    """Claimed peaks are not vacuous: with a cap of D a rank holds D; one slot less is refused and the forward named."""
    costs = Costs.uniform(8)
    found = auto(8, 16, costs, Limits(peak=8, shapes=("bidirectional",)))
    lowered = lower(found.order, found.costs)
    assert max(check(lowered).peak_activations) == 8
    with pytest.raises(ScheduleError, match=r"has 7 activation slots, and .*F.* would be activation 8"):
        check(lowered, slots=[7] * 8)
    assert any(action.kind is Kind.I for _, action in found.order)
