"""The quick makespan is that of the simulator."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxchimera.errors import ScheduleError
from fxchimera.planner.pace import makespan_of
from fxchimera.schedule import Costs, lower, make_order, schedules, simulate
from fxchimera.schedule.order import read_csv
from fxchimera.schedule.placement import one_way


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(schedules())), st.sampled_from([2, 4]), st.sampled_from([8, 12]), st.data())
def test_every_family_under_uneven_costs_and_slow_links(name, ranks, count, data):
    order = make_order(name, ranks, count)
    stages = order.placement.num_stages
    numbers = st.lists(st.floats(0, 10), min_size=stages, max_size=stages).map(tuple)
    costs = Costs(
        forward=data.draw(numbers),
        input_grad=data.draw(numbers),
        weight_grad=data.draw(numbers),
        latency=data.draw(st.floats(0, 2)),
        bytes_per_second=10.0,
        boundary_bytes=tuple(data.draw(st.lists(st.integers(0, 9), min_size=stages - 1, max_size=stages - 1))),
    )
    assert makespan_of(order)(costs) == pytest.approx(simulate(order, costs).makespan, rel=1e-12)


def test_an_order_with_messages():
    order = lower(make_order("chimera", 4, 4))
    costs = Costs.uniform(4, 1, 2, latency=0.1)
    assert makespan_of(order)(costs) == simulate(order, costs).makespan


def test_an_order_that_cannot_proceed():
    """Rank 1 waits for the forward of micro-batch 1 first, which rank 0 runs after the backward of micro-batch 0."""
    order = read_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0", one_way(2, 2))
    with pytest.raises(ScheduleError, match="1F1"):
        makespan_of(order)
