"""Numbering the operations of a stage in turn: random orders stay valid, end no later, and hold no more."""

from __future__ import annotations

import itertools
import random

import pytest

from fxchimera.planner.ascending import ascending
from fxchimera.planner.memory import holdings
from fxchimera.schedule import Costs, check, lower, simulate
from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.order import Order
from fxchimera.schedule.placement import Placement, bidirectional, one_way, v_shape

PLACEMENTS = {
    "one way": one_way(3, 6),
    "bidirectional": bidirectional(3, 7),
    "v": v_shape(2, 5),
    "alternating": Placement(2, ((0, 1), (1, 0)), (1, 0, 1, 0, 0)),
}


def shuffled(place: Placement, seed: int) -> Order:
    """An order drawn at random from those that can proceed; some backwards are whole."""
    generator = random.Random(seed)
    needs: dict[Action, list[Action]] = {}
    for m in range(place.n_microbatches):
        later: Action | None = None
        for stage in reversed(range(place.num_stages)):
            whole = generator.random() < 0.4
            back = Action(stage, Kind.B if whole else Kind.I, m)
            needs[Action(stage, Kind.F, m)] = [Action(stage - 1, Kind.F, m)] if stage else []
            needs[back] = [Action(stage, Kind.F, m), *([later] if later else [])]
            if not whole:
                needs[Action(stage, Kind.W, m)] = [back]
            later = back
    ranks: list[list[Action]] = [[] for _ in range(place.num_ranks)]
    done: set[Action] = set()
    while ready := [action for action, before in needs.items() if action not in done and done.issuperset(before)]:
        action = generator.choice(ready)
        done.add(action)
        ranks[place.rank(action.stage, action.microbatch or 0)].append(action)
    return Order("shuffled", place, tuple(map(tuple, ranks)))


@pytest.mark.parametrize(("name", "seed"), tuple(itertools.product(PLACEMENTS, range(10))))
def test_numbered_in_turn(name: str, seed: int) -> None:
    place = PLACEMENTS[name]
    generator = random.Random(seed)
    forward, first, second = (tuple(generator.choice((1.0, 1.5, 2.0)) for _ in range(place.num_stages)) for _ in range(3))
    costs = Costs(forward=forward, input_grad=first, weight_grad=second, latency=0.25)
    before = shuffled(place, seed)
    after = ascending(before)
    check(lower(after))
    assert sorted(map(str, (action for _, action in after if action.kind is Kind.F))) == sorted(
        map(str, (action for _, action in before if action.kind is Kind.F))
    )
    for old, new in zip(before.ranks, after.ranks, strict=True):
        assert [(action.stage, action.kind) for action in old] == [(action.stage, action.kind) for action in new]
    for rank, (pipe, stage) in ((r, replica) for r in range(place.num_ranks) for replica in place.replicas(r)):
        for kinds in ((Kind.F,), (Kind.B, Kind.I), (Kind.W,)):
            numbers = [
                action.microbatch
                for action in after.ranks[rank]
                if action.stage == stage and action.kind in kinds and place.pipe_of[action.microbatch or 0] == pipe
            ]
            assert numbers == sorted(numbers, key=lambda number: number or 0)
    assert simulate(after, costs).makespan <= simulate(before, costs).makespan + 1e-9
    assert holdings(after) == holdings(before)
    assert ascending(after) == after
