"""The unit of the costs, the price of a split, and the size of a problem: what a search must not lose over them."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fxchimera.errors import ScheduleError
from fxchimera.schedule import Costs, Limits, auto, certify, make_order, schedules
from fxchimera.schedule.scale import scaled
from fxchimera.schedule.search import Search, unpriced_share

SECONDS = st.sampled_from([0.25, 0.5, 1.0, 1.1, 1.2, 0.8, 2.7])


@st.composite
def asked(draw):
    """(costs, N, cap) of a small search, with and without a price and bytes."""
    depth = draw(st.integers(2, 4))
    stages = st.tuples(*[SECONDS] * depth)
    costs = Costs(
        forward=draw(stages),
        input_grad=draw(stages),
        weight_grad=draw(stages),
        latency=draw(st.sampled_from([0.0, 0.1])),
        boundary_bytes=draw(st.sampled_from([(), (64,) * (depth - 1)])),
        bytes_per_second=640.0,
    )
    price = draw(st.sampled_from([None, 0.02, 0.1]))
    return costs if price is None else costs.with_split_price(price), draw(st.integers(1, 7)), float(draw(st.integers(1, depth)))


def times(costs, factor):
    """The same costs in a unit that is so much smaller."""
    grown = {
        name: tuple(factor * one for one in getattr(costs, name)) for name in ("forward", "input_grad", "weight_grad", "backward")
    }
    return dataclasses.replace(costs, latency=factor * costs.latency, bytes_per_second=costs.bytes_per_second / factor, **grown)


@settings(max_examples=12, deadline=None)
@given(asked(), st.sampled_from([2.0**-20, 2.0**-10, 2.0**20, 1e-3, 1e-6, 1e6]))
def test_the_unit_of_the_costs_does_not_matter(case, factor):
    """Microseconds or days: the same order, its figures in the given unit; for powers of two to the last bit."""
    costs, number, peak = case
    exact = factor in (2.0**-20, 2.0**-10, 2.0**20)
    one = auto(len(costs.forward), number, costs, Limits(peak=peak), seconds=0.03)
    two = auto(len(costs.forward), number, times(costs, factor), Limits(peak=peak), seconds=0.03)
    if exact:
        assert two.order == one.order
        assert two.certificate.makespan == factor * one.certificate.makespan
        assert two.certificate.lower_bound == factor * one.certificate.lower_bound
    else:
        assert two.order == one.order
        assert two.certificate.makespan == pytest.approx(factor * one.certificate.makespan, rel=1e-12)
    assert two.certificate.gap == pytest.approx(one.certificate.gap, abs=1e-12)


def test_the_unit_is_a_third_of_a_mean_stage():
    """Costs of a mean 1 stay, to the last bit where they are multiples of 2^-40; those of no price lose their whole backwards."""
    costs = Costs(forward=(1.0, 1.0), input_grad=(1.25, 0.75), weight_grad=(0.75, 1.25), backward=(2.0, 2.0), latency=0.5)
    assert scaled(costs) == (dataclasses.replace(costs, backward=()), 1.0)
    assert scaled(times(costs, 1e-6))[0] == dataclasses.replace(costs, backward=(), bytes_per_second=float("inf"))
    priced = costs.with_split_price(0.25)
    assert scaled(priced) == (priced, 1.0)
    nothing = Costs(forward=(0.0,), input_grad=(0.0,), weight_grad=(0.0,))
    assert scaled(nothing) == (nothing, 1.0)


@settings(max_examples=8, deadline=None)
@given(
    st.integers(2, 5),
    st.integers(2, 9),
    st.sampled_from(["one-way", "v", "bidirectional", "bidirectional-v"]),
    st.sampled_from([0.001, 0.02, 0.1]),
    st.sampled_from([0.0, 0.1]),
    st.integers(0, 3),
)
def test_never_worse_than_without_the_price(depth, number, shape, price, latency, seed):
    """The order that the search finds where splitting costs nothing, in its share of the time, is not better at the true price."""
    costs = Costs(forward=(1.0,) * depth, input_grad=(1.2,) * depth, weight_grad=(0.8,) * depth, latency=latency)
    limits, priced = Limits(peak=depth, shapes=(shape,)), costs.with_split_price(price)
    found = auto(depth, number, priced, limits, seconds=0.1, seed=seed)
    free = auto(depth, number, costs, limits, seconds=0.1 * unpriced_share(priced), seed=seed)
    assert found.certificate.makespan <= certify(free.order, found.costs).makespan + 1e-9


def families(depth, number, costs, limits):
    """(name, makespan) of every published order within the limits."""
    for name in schedules():
        try:
            order = make_order(name, depth, number)
        except ScheduleError:
            continue
        peer = certify(order, costs.refined(order.placement.chunks))
        if max(peer.peak_activations) <= limits.peak and peer.weight_copies <= limits.copies:
            yield name, peer.makespan


@settings(max_examples=10, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 20), SECONDS, SECONDS, SECONDS, st.sampled_from([0.0, 0.3]), st.sampled_from([0.0, 0.01, 1.0])
)
@example(6, 12, 1.0, 1.0, 1.0, 0.0, 0.0)
def test_never_worse_than_a_family_however_short(depth, number, forward, first, second, price, seconds):
    """No time at all, or as much as there is: what is published and fits the cap is not better."""
    costs = Costs(forward=(forward,) * depth, input_grad=(first,) * depth, weight_grad=(second,) * depth, latency=0.1)
    costs, limits = costs.with_split_price(price), Limits(peak=depth + 1)
    found = auto(depth, number, costs, limits, seconds=0.2 * seconds).certificate.makespan
    for name, makespan in families(depth, number, costs, limits):
        assert found <= makespan * (1 + 1e-11), name


@pytest.mark.parametrize("price", [0.0, 0.05])
def test_large_ones_keep_to_their_budget(price):
    """32 ranks, 64 micro-batches, all shapes, a quarter of a second: it looks at no more than twice of what that buys."""
    costs = Costs(forward=(1.0,) * 32, input_grad=(1.2,) * 32, weight_grad=(0.8,) * 32, latency=0.1).with_split_price(price)
    run = Search(32, 64, costs, Limits(peak=33), 300_000, 0)
    run.run()
    assert run.used <= 2 * run.budget
    for name in ("zbv", "v-half", "dualpipe", "dualpipev"):
        order = make_order(name, 32, 64)
        assert run.unit * run.least() <= certify(order, costs.refined(order.placement.chunks)).makespan * (1 + 1e-11)
