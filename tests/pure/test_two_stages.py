"""The search with costs of 2D stages, two on each rank: their own seconds, and their own bytes."""

from __future__ import annotations

import dataclasses

import pytest

from fxchimera.errors import ScheduleError
from fxchimera.planner.memory import holdings
from fxchimera.schedule import Costs, make_order, simulate
from fxchimera.schedule.auto import auto
from fxchimera.schedule.limits import Limits

FORWARD = (1.0, 2.0, 1.0, 2.0)
UNEVEN = Costs(forward=FORWARD, input_grad=FORWARD, weight_grad=FORWARD)


@pytest.mark.parametrize("copies", [1, 2])
def test_only_shapes_with_two_stages_a_rank_take_them(copies):
    found = auto(2, 4, UNEVEN, Limits(peak=2.0, copies=copies), seconds=0.1)
    place = found.order.placement
    assert (place.num_stages, place.num_ranks, found.costs) == (4, 2, UNEVEN)
    assert found.certificate.makespan == pytest.approx(simulate(found.order, UNEVEN).makespan)
    assert set(found.compared) <= {"v", "interleaved", "bidirectional-v"}
    assert found.certificate.makespan <= simulate(make_order("zbv", 2, 4), UNEVEN).makespan


def test_equal_halves_are_those_of_the_coarse_costs():
    """Splitting each of D stages into two equal ones by hand, or letting the search do it."""
    coarse = Costs.uniform(4).with_split_price(0.04)
    limits = Limits(peak=4.0, shapes=("v",))
    by_hand = auto(4, 6, coarse.refined(2), limits, seconds=0.05)
    assert by_hand.order == auto(4, 6, coarse, limits, seconds=0.05).order


def test_the_bytes_of_each_are_its_own():
    """Stage 0 holds ten times what stage 3 does on the same rank."""
    held = (10.0, 4.0, 4.0, 1.0)
    limits = Limits(capacity=(22.0, 16.0), activation_bytes=held, shapes=("v",))
    order = auto(2, 6, UNEVEN, limits, seconds=0.1).order
    assert [rank.peak(tuple(map(int, held))) <= cap for rank, cap in zip(holdings(order), (22, 16), strict=True)] == [True, True]
    with pytest.raises(ScheduleError, match="may hold 10"):
        auto(2, 6, UNEVEN, dataclasses.replace(limits, capacity=(10.0, 16.0)))


def test_mistakes():
    with pytest.raises(ScheduleError, match="cover 3 stages, and there are 2 ranks"):
        auto(2, 4, Costs.uniform(3))
    with pytest.raises(ScheduleError, match="no shape of"):
        auto(2, 4, UNEVEN, Limits(chunks=1))
