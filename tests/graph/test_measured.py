"""What is made of measured seconds, in closed form: bandwidths, prices, a node's share of its stage; and the nodes of one stage."""

from __future__ import annotations

import math

import pytest
import torch

from fxchimera.planner.measured import calibrated, costs_by_stage, measures_of
from fxchimera.schedule.measurement import LinkTimes, Measurement, StageTimes
from fxchimera_passes.capture import capture
from fxchimera_passes.cost import NodeCosts, analytic, measured, measured_stage
from fxchimera_passes.plan import Stage, StagePlan
from fxchimera_passes.split import split
from fxchimera_passes.stages import make_plan
from tests.zoo_sample import SAMPLE


def times(forward: float, backward: float, first: float, second: float, split: float | None = None) -> StageTimes:
    """Measured seconds; a split micro-batch's forward takes as long as another's."""
    return StageTimes(
        forward=forward, split_forward=forward if split is None else split, backward=backward, input_grad=first, weight_grad=second
    )


def link(small: float, large: float, size: int = 1000) -> LinkTimes:
    return LinkTimes(ranks=(0, 1), small=small, large=large, large_bytes=size)


def stage(index: int, *nodes: str, forward: float = 1.0, again: float = 0.0) -> Stage:
    """A stage with these nodes, and estimated seconds."""
    return Stage(
        index=index, nodes=nodes, inputs=(), received=(), sent=(), parameters=(), buffers=(), owned=(), forward_seconds=forward,
        backward_seconds=2.0 * forward + again, parameter_bytes=0, recompute_seconds=again,
    )  # fmt: skip


def cut(*stages: Stage) -> StagePlan:
    return StagePlan(stages=stages, owner={}, bottleneck_seconds=1.0, bound_seconds=1.0)


def test_the_slowest_link_counts() -> None:
    """1000 bytes in 2 ms more than nothing are 500 kB/s; what is not slower for its bytes has no limit that could be seen."""
    assert link(0.001, 0.003).bytes_per_second == pytest.approx(5e5)
    assert link(0.003, 0.003).bytes_per_second == math.inf
    found = Measurement((times(1, 2, 1, 1),) * 3, (link(0.001, 0.003), link(0.002, 0.003), link(0.004, 0.001)))
    assert (found.latency, found.bytes_per_second) == (0.004, pytest.approx(5e5))
    alone = Measurement((times(1, 2, 1, 1),), ())
    assert (alone.latency, alone.bytes_per_second) == (0.0, math.inf)


def test_prices_are_those_of_all_stages_together() -> None:
    """B 2 + 6; I 3 + 3, W 1 + 3: two halves take 10 instead of 8, I six tenths; the forwards 1 + 3 grow by 0.5."""
    found = Measurement((times(1.0, 2.0, 3.0, 1.0, 1.5), times(3.0, 6.0, 3.0, 3.0)), (link(0.001, 0.003),))
    measures = measures_of(found, [stage(0, "a"), stage(1, "b")])
    assert measures.split_price == pytest.approx(0.25)
    assert measures.input_share == pytest.approx(0.6)
    assert measures.split_forward == pytest.approx(0.125)
    assert measures.link.seconds(1000) == pytest.approx(0.003)


def test_what_is_run_again_is_no_part_of_the_price() -> None:
    """Half of a forward of 2 s runs again: B is 1 + 4 s, I 1 + 2 s, W 2 s, so splitting is free."""
    found = Measurement((times(2.0, 5.0, 3.0, 2.0),), ())
    again = stage(0, "a", "b", forward=1.0, again=0.5)
    measures = measures_of(found, [again])
    assert (measures.split_price, measures.input_share) == (0.0, pytest.approx(0.5))
    costs = calibrated(cut(again), NodeCosts({"a": 1.0, "b": 3.0}, {"a": 1.0, "b": 1.0}), found.stages)
    assert costs.forward == pytest.approx({"a": 0.5, "b": 1.5})
    assert costs.backward == pytest.approx({"a": 2.0, "b": 2.0})


def test_nodes_are_scaled_stage_by_stage() -> None:
    """Shares within a stage stay, their sum is what was measured; without shares all are equal; a repeated node counts once."""
    shares = NodeCosts({"a": 1.0, "b": 3.0, "c": 0.0, "d": 0.0}, {"a": 1.0, "b": 1.0, "c": 5.0, "d": 0.0})
    found = [times(8.0, 6.0, 3.0, 3.0), times(1.0, 10.0, 5.0, 5.0)]
    costs = calibrated(cut(stage(0, "a", "b"), stage(1, "b", "c", "d")), shares, found)
    assert costs.forward == pytest.approx({"a": 2.0, "b": 6.0, "c": 0.5, "d": 0.5})
    assert costs.backward == pytest.approx({"a": 3.0, "b": 3.0, "c": 10.0, "d": 0.0})


def test_a_stage_that_computes_nothing() -> None:
    costs = calibrated(cut(stage(0), stage(1, "a")), NodeCosts({"a": 1.0}, {"a": 1.0}), [times(1e-6, 0, 0, 0), times(2, 4, 2, 2)])
    assert (costs.forward, costs.backward) == ({"a": 2.0}, {"a": 4.0})


def test_a_dearer_forward_is_charged_to_the_halves() -> None:
    """Half a second, two thirds of it to I."""
    found = Measurement((times(1.0, 3.0, 2.0, 1.0, 1.5),), ())
    costs = costs_by_stage([stage(0, "a")], found)
    assert (costs.forward, costs.backward) == ((1.0,), (3.0,))
    assert costs.input_grad[0] == pytest.approx(2.0 + 1.0 / 3.0)
    assert costs.weight_grad[0] == pytest.approx(1.0 + 1.0 / 6.0)
    assert costs_by_stage([stage(0, "a")], found, shared=True).sync_bytes_per_second == math.inf


@pytest.mark.parametrize("name", ["DictCache", "InplaceResidual"])
def test_the_nodes_of_one_stage_alone(name: str) -> None:
    """Every node once, those that fill a dict for a later one or write in place too; gradients flow through what was received."""
    example = SAMPLE[name]()
    captured = capture(example.model, example.args, example.kwargs, num_stages=2)
    plan = make_plan(captured, analytic(captured), 2)
    sent = [tensor.detach() for tensor in split(captured, plan)[0].bind(example.model)(*example.args)]
    before = [tensor.clone() for tensor in sent]
    parts = [
        measured_stage(captured, one, received, example.args, repeats=1)
        for one, received in zip(plan.stages, ([], sent), strict=True)
    ]
    for found, one in zip(parts, plan.stages, strict=True):
        assert set(found.forward) == set(found.backward) == set(one.nodes)
    whole = measured(captured, example.args, example.kwargs, repeats=1)
    assert set(whole.forward) == set(parts[0].forward) | set(parts[1].forward)
    reached = [node for node, seconds in whole.backward.items() if seconds > 0.0]
    assert all(parts[0].backward.get(node, 0.0) > 0.0 or parts[1].backward.get(node, 0.0) > 0.0 for node in reached)
    assert all(map(torch.equal, sent, before))
    assert all(parameter.grad is None for parameter in example.model.parameters())
