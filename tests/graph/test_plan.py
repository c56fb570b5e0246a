"""Plans: every stage has work and parameters, only what must cross crosses, and mistakes are named."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from fxchimera_passes.analytic import NodeCosts, analytic
from fxchimera_passes.capture import capture
from fxchimera_passes.errors import PartitionError
from fxchimera_passes.liveness import crossing, sweep
from fxchimera_passes.split import split
from fxchimera_passes.stages import make_plan, transfer
from tests.graph.staged import planned, recorded
from tests.graph.traced import trace
from tests.models import MODELS


def chain(*costs: float) -> tuple[nn.Module, object, NodeCosts]:
    """Equal linear layers in a row with the given costs."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in costs))
    captured = trace(model, torch.randn(2, 4))
    names = [node.name for node in captured.graph.nodes if node.op == "call_module"]
    return model, captured, NodeCosts(dict(zip(names, costs, strict=True)), dict.fromkeys(names, 0.0))


@pytest.mark.parametrize(
    ("costs", "stages", "bottleneck"),
    [((1, 1, 1, 1, 1), 4, 2), ((1, 1, 1, 1), 4, 1), ((100, 1, 1, 1), 4, 100), ((3, 1, 2, 5, 2, 2), 3, 6)],
)
def test_every_stage_has_work(costs, stages, bottleneck):
    _, captured, seconds = chain(*costs)
    plan = make_plan(captured, seconds, stages)
    names = [name for stage in plan.stages for name in stage.nodes]
    assert names == [node.name for node in captured.graph.nodes if node.op == "call_module"]
    assert all(stage.nodes and stage.owned for stage in plan.stages)
    assert plan.bottleneck_seconds == plan.bound_seconds == bottleneck
    assert plan.gap == 0.0


@pytest.mark.parametrize(("layers", "stages"), [(3, 7), (1, 3)])
def test_too_few_parameters_names_both_numbers(layers, stages):
    _, captured, seconds = chain(*[1.0] * layers)
    with pytest.raises(PartitionError, match=rf"{stages} stages were asked for.*has {2 * layers} parameters.*num_stages={layers}"):
        make_plan(captured, seconds, stages)


@pytest.mark.parametrize("num_stages", [2, 8])
@pytest.mark.parametrize("name", MODELS)
def test_the_zoo_is_cut_into_a_chain(name, num_stages):
    captured = recorded(name, num_stages)
    plan = make_plan(captured, analytic(captured), num_stages)
    assert len(plan.stages) == num_stages
    assert sorted(name for stage in plan.stages for name in stage.owned) == sorted(captured.parameters)
    assert all(stage.owned for stage in plan.stages)
    for left, right in itertools.pairwise(plan.stages):
        assert left.sent == right.received
    first = {}
    for stage in plan.stages:
        for parameter in stage.parameters:
            first.setdefault(parameter, stage.index)
    for parameter, stage in first.items():  # the first reader owns it, unless it is lent to a stage that has no other
        assert plan.owner[parameter] == stage or plan.stages[plan.owner[parameter]].owned == (parameter,)
    assert plan.bound_seconds <= plan.bottleneck_seconds <= 1.1 * plan.bound_seconds


@pytest.mark.parametrize("name", ["gpt2", "bert", "masked_rotary", "vit"])
def test_only_activations_cross(name):
    captured = recorded(name, 4)
    plan = make_plan(captured, analytic(captured), 4)
    nodes = {node.name: node for node in captured.graph.nodes}
    for stage in plan.stages[:-1]:
        for value in stage.sent:
            assert value.meta.requires_grad, f"{value.name} of stage {stage.index}"
            assert "parameter" in nodes[value.name].meta["info"].depends


def test_whole_blocks_send_one_hidden_state_each():
    example = MODELS["masked_rotary"]()
    names = ["blocks.2", "blocks.4", "blocks.6"]
    _, plan = planned(example, 4, split_points=names)
    for stage in plan.stages[:-1]:
        assert [value.meta.shape for value in stage.sent] == [(4, 10, 16)]
    for stage, block in zip(plan.stages[1:], (2, 4, 6), strict=True):
        assert f"blocks.{block}.norm1.weight" in stage.owned
        assert stage.buffers == ("table",)
        assert stage.inputs == (1,)


def test_a_tied_parameter_belongs_to_the_first_stage_that_reads_it():
    _, plan = planned(MODELS["tied"](), 4)
    assert plan.owner["embed.weight"] == 0
    assert "embed.weight" in plan.stages[-1].parameters
    assert "embed.weight" not in plan.stages[-1].owned
    assert plan.stages[-1].parameter_bytes >= 48 * 16 * 4


class Spare(nn.Module):
    """Has parameters that the forward never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"used": nn.Linear(4, 4), "spare": nn.Linear(4, 4)}) for _ in range(4))
        self.lonely = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block["used"](x)
        return x


def test_a_parameter_that_is_never_read_joins_its_neighbours():
    captured = trace(Spare(), torch.randn(2, 4))
    plan = make_plan(captured, analytic(captured), 4)
    assert [plan.owner[f"blocks.{i}.spare.weight"] for i in range(4)] == [0, 1, 2, 3]
    assert plan.owner["lonely"] == 3
    assert plan.stages[3].parameter_bytes == 4 * (2 * (16 + 4) + 3)


def test_split_points_begin_stages():
    _, captured, seconds = chain(1, 1, 1, 1)
    plan = make_plan(captured, seconds, 3, split_points=["3", "1"])
    assert [len(stage.nodes) for stage in plan.stages] == [1, 2, 1]


@pytest.mark.parametrize(
    ("points", "stages", "message"),
    [
        (["1"], 3, "names 1 modules, num_stages=3 needs 2"),
        (["blocks.2.usde"], 2, "'blocks.2.usde' is not a module.*did you mean 'blocks.2.used'"),
        (["blocks.0.used"], 2, "where the forward begins: stage 0 would be empty"),
        (["blocks"], 2, "forward begins|not called"),
        (["blocks.1.spare"], 2, "was not called"),
        (["blocks.1.used", "blocks.1"], 3, "begin at the same operation"),
    ],
)
def test_split_points_that_cannot_be_used_are_named(points, stages, message):
    captured = trace(Spare(), torch.randn(2, 4))
    with pytest.raises(PartitionError, match=message):
        make_plan(captured, analytic(captured), stages, split_points=points)


def test_split_points_that_leave_more_stages_than_parameters_are_refused():
    captured = trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Tanh()), torch.randn(2, 4))
    with pytest.raises(PartitionError, match=r"stage 2 would own no parameter: the model has 2"):
        make_plan(captured, analytic(captured), 3, split_points=["1", "2"])


def test_pinned_nodes_stay_together():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    captured = trace(model, torch.randn(2, 4), pinned=((2, 3),))
    costs = analytic(captured)
    plan = make_plan(captured, costs, 3)
    assert [stage.nodes for stage in plan.stages] == [("_0",), ("_1", "_2"), ("_3",)]
    with pytest.raises(PartitionError, match=r"cannot be cut where '2' begins.*'_1' to '_2'"):
        make_plan(captured, costs, 2, split_points=["2"])


class Pair(nn.Module):
    """A tuple lives between the second and third layer; a size of the input is read in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(0)
        h = self.layers[1](self.layers[0](x) * length)
        values, _ = torch.max(h, 1, keepdim=True)
        pair = torch.split(self.layers[2](h), 2, 1)
        return self.layers[3](torch.cat(pair, 1) * length + values)


def test_only_tensors_cross_and_sizes_are_read_again():
    captured = trace(Pair(), torch.randn(2, 4))
    live = sweep(captured)
    tuples = {node.name for node in captured.graph.nodes if node.op.startswith("call") and node.meta["info"].value is None}
    assert len(tuples) == 3
    for position in live.cuttable:
        assert tuples.isdisjoint(value.name for value in crossing(live, position))
    plan = make_plan(captured, analytic(captured), 4)
    multiplying = [stage for stage in plan.stages if {"mul", "mul_1"} & set(stage.nodes)]
    assert multiplying == [stage for stage in plan.stages if "size" in stage.nodes]
    assert len(multiplying) == 2


class Counted(nn.Module):
    """Makes a mask of the input and counts its calls; the mask is cheap, but two copies of it would count twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.mask, self.calls = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), nn.Hardtanh(), 0
        self.mask.register_forward_hook(lambda module, args, output: setattr(module, "calls", getattr(module, "calls", 0) + 1))

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x)
        for layer in self.layers:
            x = layer(x) * mask
        return x


def test_a_module_that_keeps_state_runs_in_one_stage():
    captured = capture(Counted(), (torch.randn(2, 4),), {})
    assert captured.report.stateful == {"mask": ("calls",)}
    plan = make_plan(captured, analytic(captured), 4)
    assert ["mask" in stage.nodes for stage in plan.stages] == [True, False, False, False]


def test_the_score_decides_between_candidates():
    _, captured, seconds = chain(1, 1, 1, 1, 1, 1, 1, 1)
    asked = []

    def uneven(loads):
        asked.append(loads)
        return abs(loads[0].cost_seconds - 4) + abs(loads[1].cost_seconds - 2)

    plan = make_plan(captured, seconds, 4, score=uneven)
    assert [len(stage.nodes) for stage in plan.stages] == [4, 2, 1, 1]
    assert plan.bound_seconds == 2
    assert plan.gap == 1.0
    assert 1 < len(asked) <= 220


def test_two_directions_balance_pairs():
    # stage s and stage 3-s share a rank: a light first stage lets the last one keep its heavy head
    costs = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 5]
    _, captured, seconds = chain(*costs)

    def pairs(stages):
        c = [stage.cost_seconds for stage in stages]
        return max(c[0] + c[3], c[1] + c[2])

    plan = make_plan(captured, seconds, 4, score=pairs)
    best = min(max(sum(costs[:a]) + sum(costs[c:]), sum(costs[a:c])) for a, _, c in itertools.combinations(range(1, 11), 3))
    assert pairs(plan.stages) == best


def test_a_stage_whose_operations_are_gone_only_passes_on():
    _, captured, seconds = chain(1, 1, 1, 1)
    plan = make_plan(captured, seconds, 4)
    shorter = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    stages = transfer(captured, plan, trace(shorter, torch.randn(2, 4))).stages
    assert [stage.nodes for stage in stages] == [("_0",), ("_1",), ("_2",), ()]
    assert [[value.name for value in stage.received] for stage in stages] == [[], ["_0"], ["_1"], ["_2"]]


def test_a_stage_must_not_read_new_parameters_elsewhere():
    class Switch(nn.Module):
        def __init__(self, extra: bool) -> None:
            super().__init__()
            self.a, self.b, self.extra = nn.Linear(4, 4), nn.Linear(4, 4), extra

        def forward(self, x: Tensor) -> Tensor:
            x = self.b(torch.tanh(self.a(x)))
            return self.a(x) if self.extra else x

    first, second = (trace(Switch(extra), torch.randn(2, 4)) for extra in (False, True))
    plan = make_plan(first, analytic(first), 2)
    # the second call of a keeps to a's stage, and b has left its own, or the other way round
    with pytest.raises(PartitionError, match=r"stage 1 would read parameters.*a\.weight|stage 0 would read parameters.*b\.weight"):
        transfer(first, plan, second)


class Stamped(nn.Module):
    """Writes a buffer in two places: its state cannot live in two stages."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.a, self.b, self.c = (nn.Conv2d(3, 3, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.norm(self.b(self.norm(self.a(x)))))


def test_a_written_buffer_lives_in_one_stage():
    captured = trace(Stamped(), torch.randn(2, 3, 4, 4))
    plan = make_plan(captured, analytic(captured), 3)
    assert [stage.nodes for stage in plan.stages] == [("a",), ("norm", "b", "norm_1"), ("c",)]


def test_splitting_keeps_every_name():
    captured, plan = planned(MODELS["mlp"](), 4)
    for graph in split(captured, plan):
        assert {node.name for node in graph.graph.nodes} >= set(graph.stage.nodes)
