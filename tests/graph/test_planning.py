"""What decides how even a cut can be: which modules are opened, what is recomputed, who may own what, and what a trial costs."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fxchimera.errors import FxChimeraError
from fxchimera.planner import joint
from fxchimera.planner.choose import choose_cut
from fxchimera.planner.link import Link, Measures
from fxchimera.schedule import Costs, make_order, simulate
from fxchimera_passes.analytic import NodeCosts, analytic
from fxchimera_passes.assemble import assemble, owners
from fxchimera_passes.atoms import contract
from fxchimera_passes.capture import capture
from fxchimera_passes.coarse import Division
from fxchimera_passes.cost import measured
from fxchimera_passes.liveness import sweep
from fxchimera_passes.stages import make_plan
from fxchimera_passes.trial import Trial
from tests.graph.staged import recorded


def balance(plan):
    loads = [stage.cost_seconds for stage in plan.stages]
    return max(loads) / (sum(loads) / len(loads))


@pytest.mark.parametrize("name", ["gpt2", "masked_rotary", "vit", "tied"])
def test_a_trial_costs_what_the_assembled_stages_do(name):
    captured = recorded(name, 8)
    live, costs = sweep(captured), analytic(captured)
    atoms = contract(captured, live, costs)
    chance = random.Random(0)
    counts = tuple(1 for _ in atoms.starts)
    trial = Trial.of(live, costs, atoms.starts, Division(4, 0, counts))
    for _ in range(10):
        cuts = sorted(chance.sample(range(1, len(atoms.starts)), 3))
        positions = [atoms.starts[a] for a in cuts]
        stages = assemble(captured, live, costs, positions, owners(captured, live, positions, atoms.reads))
        loads = trial.loads(cuts)
        assert [load.forward_seconds for load in loads] == pytest.approx([stage.forward_seconds for stage in stages])
        assert [load.backward_seconds for load in loads] == pytest.approx([stage.backward_seconds for stage in stages])
        assert [load.sent_bytes for load in loads] == [sum(value.meta.bytes for value in stage.sent) for stage in stages]
        assert trial.legal(cuts)
    assert not trial.legal([1, 1, 2])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Dropping(nn.Module):
    """Leaves a layer out at random, as transformers' layer drop does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or torch.rand([]) >= 0.5:
                x = layer(x)
        return x


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Dropping(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


@pytest.mark.parametrize("seed", range(4))
def test_layers_that_the_first_look_left_out_are_opened_too(seed):
    torch.manual_seed(seed)
    captured = capture(Outer(), (torch.randn(3, 8),), {}, num_stages=4)
    assert {f"inner.layers.{i}" for i in range(4)} <= set(captured.report.opened)


class Wide(nn.Module):
    """One row through a wide layer: few operations for the bytes of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tall = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
        self.light = nn.Sequential(nn.Linear(512, 1))
        self.many = nn.Sequential(*(nn.LeakyReLU() for _ in range(60)))

    def forward(self, x: Tensor) -> Tensor:
        return self.light(self.many(self.tall(x)))


def test_modules_that_move_many_bytes_or_run_many_operators_are_opened():
    captured = capture(Wide(), (torch.randn(1, 512),), {}, num_stages=4)
    assert {"tall", "many"} <= set(captured.report.opened)
    assert "light" not in captured.report.opened  # a thousandth of the bytes, a sixtieth of the operators


class Shared(nn.Module):
    def __init__(self, calls: int) -> None:
        super().__init__()
        self.block, self.calls = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = self.block(x)
        return x


def test_calls_of_a_shared_module_are_spread():
    captured = capture(Shared(8), (torch.randn(2, 8),), {}, num_stages=2)
    plan = make_plan(captured, analytic(captured), 2)
    assert balance(plan) < 1.1
    assert [len(stage.owned) for stage in plan.stages] == [1, 1]  # weight and bias


class Masked(nn.Module):
    """Makes a large table from the input's values alone, in many small steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        table = x.detach()[:, :, None] * torch.ones(1, 1, 8)
        for step in range(40):
            table = (table + step).cos()
        for layer in self.layers:
            x = layer(x) + table.sum(-1)
        return x


def test_what_every_stage_runs_again_is_little():
    captured = capture(Masked(), (torch.randn(16, 8),), {}, num_stages=4)
    live, costs = sweep(captured), analytic(captured)
    again = sum(costs.forward[live.nodes[i].name] for i in live.recomputed)
    assert again <= 0.1 * sum(costs.forward.values())
    plan = make_plan(captured, costs, 4)
    spent = sum(stage.cost_seconds for stage in plan.stages)
    assert spent <= 1.1 * (sum(costs.forward.values()) + sum(costs.backward.values()))
    for left, right in itertools.pairwise(plan.stages):
        assert left.sent == right.received


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.cat([self.a(x), x], dim=1))[:, slice(0, 2)]


def test_a_call_with_a_list_of_tensors_is_measured():
    captured = capture(Joined(), (torch.randn(2, 4),), {})
    costs = measured(captured, (torch.randn(2, 4),), {}, repeats=1)
    assert {node.name for node in captured.graph.nodes if node.op.startswith("call")} == set(costs.forward)


class WideInside(nn.Module):
    """Two layers, and between them a step to many values and one back: 4, 64 and 4 numbers a row cross the places to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).repeat(1, 16)[:, :4])


@pytest.mark.parametrize(("bandwidth", "place"), [(math.inf, "inside"), (2048.0, "after"), (1e9, "inside")])
def test_a_message_is_not_free(bandwidth: float, place: str) -> None:
    """Seconds 10, 1, 1, 10: only a cut between the middle ones is even, and its messages are 16 times as long."""
    captured = capture(WideInside(), (torch.randn(8, 4),), {}, num_stages=2)
    names = [node.name for node in captured.graph.nodes if node.op.startswith("call")]
    assert len(names) == 4
    seconds = dict(zip(names, (10.0, 1.0, 1.0, 10.0), strict=True))
    order = make_order("1f1b", 2, 4)
    places = {"before": ((10.0, 12.0), 8 * 4 * 4), "inside": ((11.0, 11.0), 8 * 64 * 4), "after": ((12.0, 10.0), 8 * 4 * 4)}
    wait = {
        where: simulate(
            order,
            Costs(forward=two, input_grad=two, weight_grad=(0.0, 0.0), boundary_bytes=(size,), bytes_per_second=bandwidth),
        ).makespan
        for where, (two, size) in places.items()
    }
    assert min(wait, key=wait.__getitem__) == place
    cut = choose_cut(captured, NodeCosts(seconds, seconds), order, (), measures=Measures(link=Link(0.0, bandwidth)))
    assert [stage.forward_seconds for stage in cut.stages] == list(places[place][0])


@pytest.mark.parametrize(("micro", "size"), [(1.0, 0), (0.5, 3000)])
def test_a_link_takes_its_latency_and_its_bytes(micro: float, size: int) -> None:
    assert Link(micro, 1000.0).seconds(size) == micro + size / 1000
    for wrong in ({"latency": -1.0}, {"latency": math.nan}, {"bytes_per_second": 0.0}):
        with pytest.raises(FxChimeraError, match="a link has a latency"):
            Link(**wrong)


@pytest.mark.parametrize(
    ("seconds", "chosen"), [((10.0, 9.95, 9.92), 0), ((10.0, 9.8, 9.79), 1), ((10.0, 9.95, 9.8), 2), ((1.0, 2.0, 3.0), 0)]
)
def test_more_copies_must_save_a_hundredth(seconds, chosen):
    """Choices come with few copies and few stages a rank first; of those at most 1 % above the soonest the first is taken."""
    found = [SimpleNamespace(seconds=one) for one in seconds]
    assert joint._preferred(found) is found[chosen]
