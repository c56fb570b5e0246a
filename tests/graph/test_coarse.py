"""Plans of models with too few pieces: parameters are lent, empty stages come first, and the reason is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxchimera_passes.analytic import NodeCosts, analytic
from fxchimera_passes.capture import capture, interpret, recapture
from fxchimera_passes.captured import Captured
from fxchimera_passes.errors import CaptureError, PartitionError
from fxchimera_passes.plan import StagePlan
from fxchimera_passes.split import split
from fxchimera_passes.stages import make_plan, transfer
from fxchimera_passes.whole import WHOLE, module_at
from tests.graph.recorded import WIDTH, Two, assert_same, build, data
from tests.graph.traced import trace


def chain(layers: int, *, pinned: tuple[tuple[int, int], ...] = ()) -> Captured:
    """Linear layers in a row; node 0 is the input, node 1 the first layer."""
    return trace(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))), torch.randn(2, WIDTH), pinned=pinned)


def work(captured: Captured, **seconds: float) -> NodeCosts:
    """One second for every call, or what ``seconds`` says."""
    names = [node.name for node in captured.graph.nodes if node.op.startswith("call")]
    return NodeCosts({name: seconds.get(name, 1.0) for name in names}, dict.fromkeys(names, 0.0))


def assert_owned_once(captured: Captured, plan: StagePlan) -> None:
    assert sorted(name for stage in plan.stages for name in stage.owned) == sorted(captured.parameters)
    assert all(stage.owned for stage in plan.stages)
    assert all(name in plan.stages[stage].owned for name, stage in plan.owner.items())


# ---------------------------------------------------------------------- stages without a parameter of their own


def test_a_stage_without_parameters_is_lent_the_smallest_of_the_stage_that_owns_most() -> None:
    captured = trace(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(2, 4))
    plan = make_plan(captured, work(captured), 3)
    assert [stage.nodes for stage in plan.stages] == [("_0",), ("_1",), ("_2",)]
    assert [stage.owned for stage in plan.stages] == [("0.weight",), ("0.bias",), ("2.weight", "2.bias")]
    assert [stage.parameters for stage in plan.stages] == [("0.weight", "0.bias"), (), ("2.weight", "2.bias")]
    assert plan.notes == ()  # every stage works


def test_a_trained_parameter_is_lent_before_a_frozen_one() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    model[0].bias.requires_grad_(False)
    captured = trace(model, torch.randn(2, 4))
    assert make_plan(captured, work(captured), 2).owner == {"0.weight": 1, "0.bias": 0}


class Tied(nn.Module):
    """A head on the embedding's weight, and a layer norm beside the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(9, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(ids)))


def test_a_tied_parameter_goes_to_the_reader_that_owns_nothing_else() -> None:
    captured = trace(build(Tied), torch.arange(4))
    plan = make_plan(captured, work(captured), 2, split_points=["head"])
    assert plan.owner == {"embed.weight": 1, "norm.weight": 0, "norm.bias": 0}
    assert [stage.parameters for stage in plan.stages] == [("embed.weight", "norm.weight", "norm.bias"), ("embed.weight",)]


def test_cuts_in_which_every_stage_has_its_own_parameter_are_preferred() -> None:
    captured = trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4))
    plan = make_plan(captured, work(captured, _1=50.0, _2=50.0), 2)
    assert plan.owner == {"0.weight": 0, "0.bias": 0, "3.weight": 1, "3.bias": 1}
    assert plan.bottleneck_seconds == 51.0  # between the heavy ones: both ends own what they read


def test_lending_never_makes_more_stages_than_parameters() -> None:
    captured = trace(nn.Sequential(nn.Linear(4, 4), *(nn.Tanh() for _ in range(6))), torch.randn(2, 4))
    assert_owned_once(captured, make_plan(captured, work(captured), 2))
    with pytest.raises(PartitionError, match=r"3 stages were asked for, but the model has 2 parameters.*Use num_stages=1"):
        make_plan(captured, work(captured), 3)


# ---------------------------------------------------------------------- stages that compute nothing


@pytest.mark.parametrize("stages", [4, 6])
def test_the_stages_without_work_come_first_and_own_something(stages: int) -> None:
    captured = chain(3)
    plan = make_plan(captured, work(captured), stages)
    assert [stage.nodes for stage in plan.stages] == [()] * (stages - 3) + [("_0",), ("_1",), ("_2",)]
    assert_owned_once(captured, plan)
    idle = plan.stages[: stages - 3]
    assert all(not (stage.received or stage.sent or stage.inputs or stage.parameters) for stage in idle)
    assert plan.bottleneck_seconds == plan.bound_seconds == 1.0
    assert f"{stages} stages were asked for, but the model is cut into 3 pieces" in plan.notes[0]
    assert ("1 stage computes nothing" if stages == 4 else "3 stages compute nothing") in plan.notes[0]
    assert "num_stages=3" in plan.notes[0]


def test_what_must_stay_together_is_named() -> None:
    captured = chain(4, pinned=((2, 4),))
    plan = make_plan(captured, work(captured), 4)
    assert [stage.nodes for stage in plan.stages] == [(), (), ("_0",), ("_1", "_2", "_3")]
    assert "from '_1' to '_3', which shares memory, state or a value that is no tensor (75% of the work)" in plan.notes[0]


def test_the_module_that_does_most_is_named() -> None:
    captured = trace(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4))
    plan = make_plan(captured, work(captured, _1=3.0), 3)
    assert "the module '1' (Linear): it is one of torch's own layers (75% of the work)" in plan.notes[0]


def test_empty_stages_stay_empty_in_another_recording() -> None:
    model = build(Two)
    first = capture(model, (data(),), {}, num_stages=4)
    plan = make_plan(first, analytic(first), 4)
    assert [bool(stage.nodes) for stage in plan.stages] == [False, False, True, True]
    other = recapture(first, (data(5),), {}, training=False)
    moved = transfer(first, plan, other)
    assert [stage.nodes for stage in moved.stages] == [stage.nodes for stage in plan.stages]
    assert [stage.owned for stage in moved.stages] == [stage.owned for stage in plan.stages]


# ---------------------------------------------------------------------- the whole model as one call


class Numpy(Two):
    """Reads its activations with numpy in its own forward."""

    def between(self, x: Tensor) -> Tensor:
        return x * torch.from_numpy((x.detach().numpy() > 0).astype("float64"))


def test_a_root_that_cannot_be_recorded_becomes_one_call() -> None:
    captured = capture(build(Numpy), (data(),), {}, num_stages=2, coarse=True)
    (call,) = (node for node in captured.graph.nodes if node.op == "call_module")
    assert call.target == WHOLE
    assert module_at(captured.model, WHOLE) is captured.model
    assert captured.open_modules == frozenset()
    assert "numpy() reads a value" in captured.report.closed[""]
    assert "test_coarse.py" in captured.report.closed[""]
    assert captured.guards == ()  # nothing is baked in
    assert_same(captured, data())
    assert_same(captured, -data())
    again = recapture(captured, (data(5),), {}, training=False)
    assert [node.target for node in again.graph.nodes if node.op == "call_module"] == [WHOLE]


def test_without_leave_such_a_root_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"Numpy\.forward cannot be recorded at .*test_coarse\.py:\d+: numpy\(\) reads"):
        capture(build(Numpy), (data(),), {}, num_stages=2)
    with pytest.raises(CaptureError, match=r"numpy\(\) reads"):  # split points cannot be kept
        capture(build(Numpy), (data(),), {}, num_stages=2, coarse=True, opened=["second"])
    with torch.device("meta"):
        model = Numpy().double()
    with pytest.raises(CaptureError, match=r"numpy\(\) reads"):  # it would have to run on values that it does not have
        capture(model, (data().to("meta"),), {}, num_stages=2, coarse=True)


def test_a_forward_that_fails_stays_an_error() -> None:
    with pytest.raises(
        CaptureError, match=r"Two\.forward fails at .*recorded\.py:\d+, in module 'first' \(Linear\) on this .*Error"
    ):
        capture(build(Two), (torch.randn(3, WIDTH + 1, dtype=torch.float64),), {}, num_stages=2, coarse=True)


class Fallible(Two):
    """Has no fake kernel in its own forward, but runs."""

    def between(self, x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            raise TypeError("not implemented for tensors without values")
        return x


def test_a_forward_that_fails_on_fake_tensors_alone_becomes_one_call() -> None:
    captured = capture(build(Fallible), (data(),), {}, num_stages=2, coarse=True)
    assert [node.target for node in captured.graph.nodes if node.op == "call_module"] == [WHOLE]
    assert_same(captured, data())


class Stray(Two):
    """Trains a tensor that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = [torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)]

    def between(self, x: Tensor) -> Tensor:
        return x * self.scale[0]


class Inner(Two):
    """Trains in its own forward."""

    def between(self, x: Tensor) -> Tensor:
        self.first.weight.square().sum().backward()
        return x


class Fresh(Two):
    """Makes a buffer while it runs."""

    def between(self, x: Tensor) -> Tensor:
        self.register_buffer("seen", x.detach())
        return x


@pytest.mark.parametrize(
    ("cls", "text"), [(Stray, "no registered parameter"), (Inner, "backward() is called"), (Fresh, "makes a new buffer seen")]
)
def test_what_would_not_run_right_as_one_call_either_is_refused(cls: type[nn.Module], text: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(build(cls), (data(),), {}, num_stages=2, coarse=True)
    assert text in str(caught.value)


def test_the_stage_of_a_whole_model_calls_the_users_own_object() -> None:
    captured = capture(build(Numpy), (data(),), {}, num_stages=2, coarse=True)
    plan = make_plan(captured, analytic(captured), 4)
    assert [len(stage.nodes) for stage in plan.stages] == [0, 0, 0, 1]
    assert_owned_once(captured, plan)
    assert "the forward of Numpy itself" in plan.notes[0]
    assert "test_coarse.py" in plan.notes[0]
    assert "submodule" in plan.notes[0]
    graphs = split(captured, plan)
    bound = graphs[-1].bind(captured.model)
    assert bound.get_submodule(WHOLE) is captured.model
    expected = captured.model(data())
    assert torch.equal(bound(data())[0], expected)
    assert all(graph.bind(captured.model)() == () for graph in graphs[:-1])
    assert torch.equal(interpret(captured, [data()])[0], expected)


# ---------------------------------------------------------------------- a forward that handles the generator itself


class Repeating(torch.autograd.Function):
    """Draws a mask, and draws it again in the backward, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        ctx.seed, ctx.p = torch.seed(), p
        torch.manual_seed(ctx.seed)
        return nn.functional.dropout(x, p)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        torch.manual_seed(ctx.seed)
        return nn.functional.dropout(gradient, ctx.p), None


class Reversible(Two):
    """Two layers with a repeated draw between them."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def between(self, x: Tensor) -> Tensor:
        return Repeating.apply(x, self.p)


def test_a_forward_that_seeds_the_generator_is_refused_if_it_draws() -> None:
    seed = torch.initial_seed()
    with pytest.raises(CaptureError, match=r"Reversible calls torch\.seed\(\) at .*test_coarse\.py:\d+.*checkpoint.*dropout 0"):
        capture(build(Reversible), (data(),), {}, num_stages=2, coarse=True)
    assert torch.initial_seed() == seed
    assert_same(capture(build(Reversible, 0.0), (data(),), {}, num_stages=2), data())
    originals = torch.seed, torch.random.seed, torch.manual_seed
    assert all(function.__module__ == "torch.random" for function in originals)
