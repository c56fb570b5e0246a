"""The search against an exact solver: the least makespan over all orders, by constraint programming (ortools), D <= 4 and N <= 8.

The model knows operations, durations, data, one thing at a time on a rank, and a rank's memory; nothing of rules, bounds or moves.
Seconds are multiplied to integers.  An instance that the solver does not close in its time is counted, not compared; that time is
the solver's own count of work, so that the same instances are closed on every machine.
"""

from __future__ import annotations

import itertools

import pytest

from fxchimera.schedule import Costs, Limits, auto, bidirectional, bidirectional_v, lower_bound, one_way, v_shape
from fxchimera.schedule.problem import Problem

cp = pytest.importorskip("ortools.sat.python.cp_model")

SHAPES = {"one-way": (one_way, 1), "v": (v_shape, 2), "bidirectional": (bidirectional, 1), "bidirectional-v": (bidirectional_v, 2)}
UNIT = 20  # ticks a second: latencies and costs are multiples of 0.05


def optimum(place, costs, peak, seconds, hint):
    """(least makespan, whether it is proven) of all orders whose backwards are split in input and weight gradient."""
    model = cp.CpModel()
    horizon = round(hint * UNIT)
    share = place.num_stages // place.num_ranks
    ends, on_rank, held = {}, [[] for _ in range(place.num_ranks)], [[] for _ in range(place.num_ranks)]
    makespan = model.new_int_var(0, horizon, "makespan")
    for m in range(place.n_microbatches):
        for stage in range(place.num_stages):
            rank, starts = place.rank(stage, m), {}
            for kind, stages in (("F", costs.forward), ("I", costs.input_grad), ("W", costs.weight_grad)):
                ticks = round(stages[stage] * UNIT)
                starts[kind] = model.new_int_var(0, horizon, f"{stage}{kind}{m}")
                ends[stage, kind, m] = starts[kind] + ticks
                on_rank[rank].append(model.new_fixed_size_interval_var(starts[kind], ticks, f"on {stage}{kind}{m}"))
                model.add(ends[stage, kind, m] <= makespan)
            model.add(starts["I"] >= ends[stage, "F", m])
            model.add(starts["W"] >= ends[stage, "I", m])
            life = model.new_int_var(0, horizon, f"life {stage} {m}")
            held[rank].append(model.new_interval_var(starts["F"], life, ends[stage, "W", m], f"held {stage} {m}"))
            ends[stage, "start", m] = starts
    lag = round(costs.latency * UNIT)
    for m in range(place.n_microbatches):
        for stage in range(place.num_stages - 1):
            hop = lag if place.rank(stage, m) != place.rank(stage + 1, m) else 0
            model.add(ends[stage + 1, "start", m]["F"] >= ends[stage, "F", m] + hop)
            model.add(ends[stage, "start", m]["I"] >= ends[stage + 1, "I", m] + hop)
    for rank in range(place.num_ranks):
        model.add_no_overlap(on_rank[rank])
        model.add_cumulative(held[rank], [1] * len(held[rank]), peak * share)
    for pipe in range(len(place.pipes)):  # equal micro-batches of a pipe: first come, first served
        members = place.microbatches(pipe)
        for one, two in itertools.pairwise(members):
            model.add(ends[0, "start", one]["F"] <= ends[0, "start", two]["F"])
    model.minimize(makespan)
    solver = cp.CpSolver()
    solver.parameters.max_deterministic_time = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    assert status in (cp.OPTIMAL, cp.FEASIBLE, cp.UNKNOWN)
    return solver.best_objective_bound / UNIT, status == cp.OPTIMAL


def compare(shape, depth, number, peak, latency, seconds, limit):
    """(ours, least of all, proven): ours is never below the solver's bound."""
    costs = Costs(forward=(1.0,) * depth, input_grad=(1.2,) * depth, weight_grad=(0.8,) * depth, latency=latency)
    if seconds == "equal":
        costs = Costs.uniform(depth, latency=latency)
    make, chunks = SHAPES[shape]
    found = auto(depth, number, costs, Limits(peak=peak, shapes=(shape,)), seconds=0.3)
    place, own = make(depth, number), costs.refined(chunks)
    least, proven = optimum(place, own, peak, limit, found.certificate.makespan)
    if proven and found.certificate.makespan > least + 1e-6:  # three seconds must do
        found = auto(depth, number, costs, Limits(peak=peak, shapes=(shape,)), seconds=3.0)
    assert lower_bound(Problem.of(place, own, peak=peak)).seconds <= (least if proven else found.certificate.makespan) + 1e-6
    assert found.certificate.makespan >= least - 1e-6
    return found.certificate.makespan, least, proven


@pytest.mark.parametrize(
    ("shape", "depth", "number", "peak", "latency"),
    [
        ("bidirectional", 4, 4, 3, 0.0),
        ("bidirectional", 4, 4, 4, 0.1),
        ("bidirectional", 3, 4, 3, 0.1),
        ("bidirectional", 3, 3, 3, 0.0),
        ("v", 2, 3, 2, 0.1),
        ("one-way", 3, 3, 2, 0.2),
    ],
)
def test_small_optima(shape, depth, number, peak, latency):
    ours, least, proven = compare(shape, depth, number, peak, latency, "equal" if latency == 0 else "uneven", 10.0)
    assert proven
    assert ours == pytest.approx(least)


@pytest.mark.matrix
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_all_optima(shape, record_testsuite_property):
    """D <= 4, N <= 8: every instance that the solver closes is matched; at least one of this shape is closed."""
    closed = instances = 0
    for depth in (2, 3, 4):
        for number in (2, 3, 4, 6, 8):
            for peak in sorted({max(1, depth - 1), depth}):
                for latency in (0.0, 0.1):
                    ours, least, proven = compare(shape, depth, number, peak, latency, "uneven", 5.0)
                    instances += 1
                    if proven:
                        closed += 1
                        assert ours == pytest.approx(least), (shape, depth, number, peak, latency)
    record_testsuite_property(f"closed of {shape}", f"{closed} of {instances}")
    assert closed
