"""The simulator against times worked out by hand."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxchimera.errors import ScheduleError
from fxchimera.schedule import Action, Costs, Event, SyncEdge, Timeline, lower, make_order, one_way, read_csv, simulate
from fxchimera.schedule.fleet import simulate_fleet


def times(timeline):
    return {(event.rank, str(event.action)): (event.start, event.end) for event in timeline.events}


def test_two_stages_by_hand():
    """F 1 and 2, B 3 and 4, half a second a message: every start and end."""
    costs = Costs(forward=(1, 2), input_grad=(1, 2), weight_grad=(2, 2), latency=0.5)
    order = make_order("1f1b", 2, 2)
    compute = {
        (0, "0F0"): (0, 1),
        (0, "0F1"): (1, 2),
        (1, "1F0"): (1.5, 3.5),
        (1, "1B0"): (3.5, 7.5),
        (0, "0B0"): (8, 11),
        (1, "1F1"): (7.5, 9.5),
        (1, "1B1"): (9.5, 13.5),
        (0, "0B1"): (14, 17),
    }
    messages = {
        (0, "0SEND_F0"): (1, 1.5),
        (1, "1RECV_F0"): (1, 1.5),
        (0, "0SEND_F1"): (2, 2.5),
        (1, "1RECV_F1"): (2, 2.5),
        (1, "1SEND_B0"): (7.5, 8),
        (0, "0RECV_B0"): (7.5, 8),
        (1, "1SEND_B1"): (13.5, 14),
        (0, "0RECV_B1"): (13.5, 14),
    }
    assert times(simulate(order, costs)) == compute
    timeline = simulate(lower(order, costs), costs)
    assert times(timeline) == compute | messages
    assert timeline.makespan == 17
    assert (timeline.busy(0), timeline.busy(1)) == (8, 12)
    assert timeline.bubble == 1 - 20 / 34
    assert timeline.span_bubble == 1 - 8 / 17  # rank 0 is the idler one: 8 of 17 seconds


def test_split_backward():
    """I frees the neighbour at once; W fills the wait."""
    order = read_csv("0F0,0I0,0W0\n1F0,1I0,1W0\n", one_way(2, 1))
    costs = Costs.uniform(2, 1, 2)
    assert times(simulate(order, costs)) == {
        (0, "0F0"): (0, 1),
        (1, "1F0"): (1, 2),
        (1, "1I0"): (2, 3),
        (1, "1W0"): (3, 4),
        (0, "0I0"): (3, 4),
        (0, "0W0"): (4, 5),
    }
    assert [str(action) for action in lower(order).ranks[1]] == ["1RECV_F0", "1F0", "1I0", "1SEND_B0", "1W0"]


def test_refresh_delays_the_mirror_and_gradients_end_the_step():
    """D=2, N=2: the mirrors wait a second for parameters, and the owners a second for the last gradients."""
    sync = (SyncEdge(0, mirror=1, owner=0, bytes=10), SyncEdge(1, mirror=0, owner=1, bytes=10))
    costs = Costs(forward=(1, 1), input_grad=(1, 1), weight_grad=(1, 1), sync_bytes_per_second=10, sync=sync)
    timeline = simulate(lower(make_order("chimera", 2, 2), sync=sync), costs)
    found = times(timeline)
    assert found[0, "1RECV_P<1"] == (0, 1)
    assert found[1, "0F1"] == (1, 2)  # the mirror of stage 0 waits
    assert found[0, "0F0"] == (0, 1)  # the owner does not
    assert found[0, "1F1"] == (2, 3)
    assert found[1, "0SEND_G>0"] == found[0, "0RECV_G<1"] == (7, 8)
    assert timeline.makespan == 8
    assert timeline.bubble == 1 - 12 / 16


def test_bytes_of_messages():
    costs = Costs(
        forward=(1, 1, 1), input_grad=(1, 1, 1), weight_grad=(1, 1, 1), latency=1, bytes_per_second=10, boundary_bytes=(20, 50)
    )
    wanted = {
        "0SEND_F0": 3,
        "1RECV_F0": 3,
        "1SEND_F0": 6,
        "2RECV_F0": 6,
        "2SEND_B0": 6,
        "1RECV_B0": 6,
        "1SEND_B0": 3,
        "0RECV_B0": 3,
    }
    assert {text: costs.message_seconds(Action.parse(text)) for text in wanted} == wanted


def test_bytes_of_exchange():
    """Both ends of an edge cost the same; with two owners of one mirror the rank tells them apart."""
    sync = (SyncEdge(2, mirror=3, owner=0, bytes=100), SyncEdge(2, mirror=3, owner=1, bytes=300))
    costs = Costs(forward=(1,), input_grad=(1,), weight_grad=(1,), latency=1, sync_bytes_per_second=100, sync=sync)
    wanted = {
        (3, "2SEND_G>0"): 2,
        (0, "2RECV_G<3"): 2,
        (0, "2SEND_P>3"): 2,
        (3, "2RECV_P<0"): 2,
        (1, "2SEND_P>3"): 4,
        (3, "2RECV_P<1"): 4,
    }
    assert {(rank, text): costs.message_seconds(Action.parse(text), rank) for rank, text in wanted} == wanted


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"forward": (1, 1)}, "cover \\(2, 1, 1\\) stages"),
        ({"forward": (-1,)}, "not negative"),
        ({"forward": (float("nan"),)}, "finite"),
        ({"bytes_per_second": 0}, "bandwidths"),
    ],
)
def test_costs_refuse(fields, message):
    with pytest.raises(ScheduleError, match=message):
        Costs(**{"forward": (1,), "input_grad": (1,), "weight_grad": (1,), **fields})


def test_costs_tell_computation_from_message():
    costs = Costs.uniform(2)
    with pytest.raises(ScheduleError, match="0SEND_F0 is a message"):
        costs.seconds(Action.parse("0SEND_F0"))
    with pytest.raises(ScheduleError, match="0F0 is a computation"):
        costs.message_seconds(Action.parse("0F0"))
    with pytest.raises(ScheduleError, match="costs cover 2 stages, the order has 3"):
        simulate(make_order("1f1b", 3, 1), costs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0B0,0F0\n1F0,1B0\n", "rank 0 stands at 0B0 and waits for 0RECV_B0.*; rank 1 stands at 1F0 and waits for 1RECV_F0"),
        ("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "rank 0 stands at 0B0 .*; rank 1 stands at 1F0 and waits for 1RECV_F0"),
        ("0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "rank 0 stands at 0SEND_F0 and waits for a computation"),
    ],
    ids=["backward first", "send missing", "send before its forward"],
)
def test_blocked_actions_are_named(text, message):
    with pytest.raises(ScheduleError, match=message):
        simulate(read_csv(text, one_way(2, 1)), Costs.uniform(2))


FLOATS = st.floats(0.0, 10.0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_lowered_and_compute_only_agree(data):
    """Without exchange the messages change nothing: the same seconds for every computation, zero durations included."""
    depth = data.draw(st.sampled_from([1, 2, 4, 6]))
    schedule = data.draw(st.sampled_from(["gpipe", "1f1b", "chimera"]))
    stages = st.tuples(*[FLOATS] * depth)
    costs = Costs(forward=data.draw(stages), input_grad=data.draw(stages), weight_grad=data.draw(stages), latency=data.draw(FLOATS))
    order = make_order(schedule, depth, data.draw(st.integers(1, 9)))
    assert set(simulate(lower(order, costs), costs).compute) == set(simulate(order, costs).events)


def brute_force(order, costs):
    """Start and end by relaxation to the fixed point of start = max(end of the rank's previous, arrival of data)."""
    place, end = order.placement, {}
    for _ in range(sum(map(len, order.ranks)) + 1):
        before = dict(end)
        for rank, actions in enumerate(order.ranks):
            free = 0.0
            for action in actions:
                step = -1 if action.kind.value == "F" else 1
                source = action.stage + step
                ready = 0.0
                if 0 <= source < place.num_stages:
                    ready = end.get((source, action.kind, action.microbatch), 0.0)
                    ready += costs.latency if place.rank(source, action.microbatch) != rank else 0.0
                free = max(free, ready) + costs.seconds(action)
                end[action.stage, action.kind, action.microbatch] = free
        if end == before:
            return end
    raise AssertionError("no fixed point")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_against_brute_force(data):
    depth = data.draw(st.sampled_from([2, 4]))
    stages = st.tuples(*[st.floats(0.1, 4.0)] * depth)
    costs = Costs(forward=data.draw(stages), input_grad=data.draw(stages), weight_grad=data.draw(stages), latency=data.draw(FLOATS))
    order = make_order(data.draw(st.sampled_from(["gpipe", "1f1b", "chimera"])), depth, data.draw(st.integers(1, 8)))
    found = {(event.action.stage, event.action.kind, event.action.microbatch): event.end for event in simulate(order, costs).events}
    assert found == pytest.approx(brute_force(order, costs))


def test_timeline_of_a_measured_run():
    """Clocks do not start at zero, and a run without events has neither length nor bubble."""
    action = Action.parse("0F0")
    timeline = Timeline("run", one_way(1, 1), (Event(0, action, 10.0, 11.0), Event(0, Action.parse("0B0"), 13.0, 14.0)))
    assert (timeline.start, timeline.makespan, timeline.bubble, timeline.span_bubble) == (10.0, 4.0, 0.5, 0.5)
    empty = Timeline("nothing", one_way(1, 1), ())
    assert (empty.makespan, empty.bubble, empty.span_bubble) == (0.0, 0.0, 0.0)


def test_exclusive_links_by_hand():
    """Rank 0 sends a forward of 2 seconds on the wire every second: the second waits for the first, the third for both."""
    costs = Costs(forward=(1, 0.5), input_grad=(0, 0), weight_grad=(0, 0), latency=0.25, bytes_per_second=10, boundary_bytes=(20,))
    order = make_order("gpipe", 2, 3)
    for one in (order, lower(order, costs)):
        shared = times(simulate(one, costs))
        assert [shared[1, f"1F{m}"] for m in range(3)] == [(3.25, 3.75), (4.25, 4.75), (5.25, 5.75)]
        queued = times(simulate(one, costs, exclusive_links=True))
        assert [queued[1, f"1F{m}"] for m in range(3)] == [(3.25, 3.75), (5.25, 5.75), (7.25, 7.75)]


def test_noise():
    """A factor a computation, the same in every order of a placement, 1 on average; without noise nothing changes."""
    costs = Costs.uniform(4)
    one, other = (
        {str(event.action): event.end - event.start for event in simulate(order, costs, noise=0.1, seed=3).compute}
        for order in (make_order("gpipe", 4, 50), make_order("1f1b", 4, 50))
    )
    assert one == pytest.approx(other)
    forwards = [seconds for name, seconds in one.items() if "F" in name]
    assert sum(forwards) / len(forwards) == pytest.approx(1.0, abs=0.03)
    assert min(forwards) < 0.9 < 1.1 < max(forwards)
    quiet = simulate(make_order("1f1b", 4, 9), costs)
    assert simulate(make_order("1f1b", 4, 9), costs, noise=0.0, seed=8) == quiet


@pytest.mark.parametrize("name", ["1f1b", "chimera", "zbv"])
def test_fleet(name):
    """Without noise each pipeline takes what one takes; the all-reduce of a stage starts after its last backward anywhere."""
    order = make_order(name, 4, 8)
    costs = Costs.uniform(order.placement.num_stages, latency=0.1)
    alone = simulate(order, costs)
    fleet = simulate_fleet(order, costs, 3)
    assert fleet.compute == pytest.approx((alone.makespan,) * 3)
    assert (fleet.step, fleet.exposed) == (pytest.approx(alone.makespan), 0.0)
    noisy = simulate_fleet(order, costs, 50, noise=0.1, seed=1)
    assert len(set(noisy.compute)) == 50
    assert noisy == simulate_fleet(order, costs, 50, noise=0.1, seed=1)


def test_fleet_all_reduce_by_hand():
    """1F1B, D=2, N=1, F=1, B=2: stage 1 ends at 4, stage 0 at 6; over 4 pipelines a ring moves 2*3/4 of 80 bytes at 10 a second."""
    costs = Costs(forward=(1, 1), input_grad=(1, 1), weight_grad=(1, 1), sync_bytes_per_second=10)
    fleet = simulate_fleet(make_order("1f1b", 2, 1), costs, 4, stage_bytes=(80, 80))
    assert (fleet.compute, fleet.step, fleet.exposed) == ((6.0,) * 4, 18.0, 12.0)
    hidden = simulate_fleet(make_order("1f1b", 2, 1), costs, 4, stage_bytes=(0, 10))
    assert (hidden.step, hidden.exposed) == (6.0, 0.0)  # stage 1's 1.5 seconds lie beside stage 0's backward


def test_large_ones_are_quick():
    """2,048 ranks (64 pipelines of D=32, N=64), and D=32 with N=256: asked at most a second each, on a processor of its own."""
    order, costs = make_order("chimera", 32, 64), Costs.uniform(32, latency=0.1)
    begin = time.process_time()
    simulate_fleet(order, costs, 64, noise=0.1, stage_bytes=(1,) * 32)
    assert time.process_time() - begin < 1.0
    long = make_order("chimera", 32, 256)
    begin = time.process_time()
    simulate(long, costs)
    assert time.process_time() - begin < 1.0
