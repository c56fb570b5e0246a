"""Stages run one after the other give what the plain model gives."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxchimera_passes.analytic import analytic
from fxchimera_passes.capture import capture, recapture
from fxchimera_passes.captured import info
from fxchimera_passes.keyed import microbatch_randomness
from fxchimera_passes.scope import call_in_scope
from fxchimera_passes.split import split
from fxchimera_passes.stages import make_plan, transfer
from fxchimera_passes.structure import flatten
from tests.graph.staged import assert_same_gradients, assert_same_output, forward, plain, planned, recorded, step
from tests.graph.traced import trace
from tests.models import MODELS, Example


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_the_plain_models(name, num_stages):
    example, reference = (MODELS[name](dtype=torch.float64) for _ in range(2))
    captured = recorded(name, num_stages)
    output, loss = step(captured, make_plan(captured, analytic(captured), num_stages), example)
    expected, expected_loss = plain(reference)
    assert_same_output(output, expected)
    assert torch.equal(loss, expected_loss)
    assert_same_gradients(example.model, reference.model)
    for (key, value), (_, wanted) in zip(example.model.state_dict().items(), reference.model.state_dict().items(), strict=True):
        assert torch.equal(value, wanted), key


@pytest.mark.parametrize("name", MODELS)
def test_dropout_masks_do_not_depend_on_the_number_of_stages(name):
    example = MODELS[name](dtype=torch.float64, dropout=0.3)
    captured = recorded(name, 8, 0.3)
    losses = {}
    for num_stages, microbatch in ((1, 0), (2, 0), (4, 0), (8, 0), (2, 1)):
        plan = make_plan(captured, analytic(captured), num_stages)
        with microbatch_randomness(7, 3, microbatch):
            losses[num_stages, microbatch] = step(captured, plan, example)[1].item()
    assert losses[1, 0] == losses[2, 0] == losses[4, 0] == losses[8, 0] != losses[2, 1]
    # a recording that keeps more modules whole names the same operations; attention may take another kernel, equal up to rounding
    with microbatch_randomness(7, 3, 0):
        whole = recorded(name, 1, 0.3)
        loss = step(whole, make_plan(whole, analytic(whole), 1), example)[1].item()
    assert loss == pytest.approx(losses[1, 0], rel=1e-12)


@pytest.mark.parametrize("name", ["mlp", "gpt2", "bert", "resnet", "skip", "masked_rotary", "tied"])
def test_the_cut_is_kept_for_another_batch_size_and_in_eval_mode(name):
    example, other = (MODELS[name](dtype=torch.float64, batch=batch, dropout=0.1) for batch in (4, 7))
    captured, plan = planned(example, 4)
    larger = recapture(captured, other.args, other.kwargs, training=True)
    moved = transfer(captured, plan, larger)
    with microbatch_randomness(1, 1, 1):
        first = larger.out_structure.rebuild(forward(larger, moved, example.model, flatten((other.args, other.kwargs))[0])[0])
    evaluated = recapture(captured, example.args, example.kwargs, training=False)
    kept = transfer(captured, plan, evaluated)
    example.model.eval()
    outputs, _ = forward(evaluated, kept, example.model, flatten((example.args, example.kwargs))[0])
    assert_same_output(evaluated.out_structure.rebuild(outputs), example.model(*example.args, **example.kwargs))
    assert flatten(first)[0][-1].shape[0] in (7, 7 * 10)
    for old, new in zip(plan.stages, moved.stages, strict=True):
        assert (old.parameters, old.owned) == (new.parameters, new.owned)
        assert new.cost_seconds > old.cost_seconds
    assert all(set(new.parameters) <= set(old.parameters) for old, new in zip(plan.stages, kept.stages, strict=True))
    assert kept.owner == moved.owner == plan.owner


def test_stages_call_the_users_own_modules():
    example = MODELS["vit"]()
    captured, plan = planned(example, 4)
    modules = dict(example.model.named_modules(remove_duplicate=False))
    parameters = dict(example.model.named_parameters(remove_duplicate=False))
    called = 0
    for graph in split(captured, plan):
        bound = graph.bind(example.model)
        for name in graph.modules:
            assert bound.get_submodule(name) is modules[name]
            called += 1
        for name in graph.attributes:
            path, _, last = name.rpartition(".")
            assert getattr(bound.get_submodule(path), last) is parameters[name]
    assert called > 8


def test_a_clone_of_the_model_can_be_bound():
    example, clone, reference = (MODELS["tied"](dtype=torch.float64) for _ in range(3))
    captured, plan = planned(example, 2)
    step(captured, plan, example, root=clone.model)
    plain(reference)
    assert_same_gradients(clone.model, reference.model)
    assert all(parameter.grad is None for parameter in example.model.parameters())


def test_most_operations_are_written_plainly():
    example = MODELS["mlp"](dropout=0.1)
    captured, plan = planned(example, 2)
    wrapped = [node for graph in split(captured, plan) for node in graph.graph.nodes if node.target is call_in_scope]
    assert len(wrapped) == sum(isinstance(module, nn.Dropout) for module in example.model.modules())
    assert "call_in_scope" not in split(*planned(MODELS["mlp"](), 2))[0].bind(MODELS["mlp"]().model).code


class Surroundings(nn.Module):
    """Part of the forward without gradients, part in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        with torch.no_grad():
            scale = self.layers[1](x).abs().mean()
        x = self.layers[2](x) / scale
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.layers[3](x)
        return self.layers[4](x.float())


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_grad_mode_and_autocast_are_kept(num_stages):
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    examples = []
    for _ in range(2):
        torch.manual_seed(1)
        examples.append(Example(Surroundings(), (x,), {}, None, lambda output, _: output.square().mean()))
    example, reference = examples
    output, _ = step(*planned(example, num_stages), example)
    expected, _ = plain(reference)
    assert_same_output(output, expected)
    assert_same_gradients(example.model, reference.model)
    assert example.model.layers[1].weight.grad is None


class Written(nn.Module):
    """Every layer writes in place into what the layer before made; a residual is read after the write."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            flat = x.view(-1)
            flat.mul_(0.5)
            x[:, 0] = 1.0
            x = torch.relu_(x)
        return x


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_in_place_writes_across_every_cut(num_stages):
    examples = []
    for _ in range(2):
        torch.manual_seed(1)
        examples.append(
            Example(Written().double(), (torch.ones(3, 8).double(),), {}, None, lambda output, _: output.square().sum())
        )
    example, reference = examples
    output, _ = step(*planned(example, num_stages), example)
    expected, _ = plain(reference)
    assert_same_output(output, expected)
    assert_same_gradients(example.model, reference.model)


class Starts(nn.Module):
    """A stage that may begin with an in-place activation of what it received."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


def test_a_received_value_may_be_written():
    torch.manual_seed(0)
    model = Starts()
    captured = trace(model, torch.randn(2, 8))
    plan = make_plan(captured, analytic(captured), 2, split_points=["act"])
    received = torch.randn(2, 8, requires_grad=True)
    before = received.detach().clone()
    split(captured, plan)[1].bind(model)(received)[0].sum().backward()
    assert torch.equal(received, before)
    assert received.grad is not None


class Doubling(nn.Module):
    """Writes its argument and returns that same tensor; nothing in its name says so."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class DoublingInside(nn.Module):
    """Writes a tensor that it is given inside a container."""

    def forward(self, state: dict[str, list[Tensor]]) -> Tensor:
        state["x"][0].mul_(2)
        return state["x"][0]


class Given(nn.Module):
    def __init__(self, inner: nn.Module, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a, self.inner, self.b, self.wrap = nn.Linear(8, 8), inner, nn.Linear(8, 8), wrap

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.inner(self.wrap(self.a(x))))


@pytest.mark.parametrize(
    ("inner", "wrap", "argument"),
    [
        (Doubling(), lambda x: x, "a"),
        (DoublingInside(), lambda x: {"x": [x]}, "a"),
        (DoublingInside(), lambda x: defaultdict(list, x=[x]), "rebuild"),
    ],
)
def test_a_custom_layer_may_write_what_its_stage_received(inner, wrap, argument):
    torch.manual_seed(0)
    model, x = Given(inner, wrap).double(), torch.randn(2, 8, dtype=torch.float64)
    captured = capture(model, (x,), {})
    nodes = {node.name: node for node in captured.graph.nodes}
    assert info(nodes["inner"]).mutates == (argument,)
    plan = make_plan(captured, analytic(captured), 2, split_points=["inner"])
    reference = copy.deepcopy(model)
    example = Example(model, (x,), {}, None, lambda output, _: output.square().sum())
    output, _ = step(captured, plan, example)
    expected, _ = plain(example._replace(model=reference))
    assert_same_output(output, expected)
    assert_same_gradients(model, reference)


class Table(nn.Module):
    """Takes the hidden states for their dtype and length alone, as transformers' rotary embeddings do."""

    def forward(self, hidden: Tensor, ids: Tensor) -> Tensor:
        positions = torch.arange(hidden.shape[1], dtype=hidden.dtype, device=ids.device)
        return positions.cos()[None, :, None] * (ids[:, :1, None] > 3)


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.table = nn.Embedding(9, 8), Table()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        table = self.table(x, ids)
        for layer in self.layers:
            x = layer(x) * table
        return x


def test_a_reader_of_shapes_is_run_again_with_a_stand_in():
    torch.manual_seed(0)
    ids = torch.randint(9, (3, 5))
    model = Rotated().double()
    captured = capture(model, (ids,), {}, num_stages=4, closed=("table",))
    (table,) = (node for node in captured.graph.nodes if node.target == "table")
    assert info(table).depends == {"input"}
    plan = make_plan(captured, analytic(captured), 4)
    assert [len(stage.sent) for stage in plan.stages] == [1, 1, 1, 0]
    assert all(stage.inputs == (0,) for stage in plan.stages)
    clone = copy.deepcopy(model)
    output, _ = step(captured, plan, Example(model, (ids,), {}, None, lambda output, _: output.square().sum()))
    expected, _ = plain(Example(clone, (ids,), {}, None, lambda output, _: output.square().sum()))
    assert_same_output(output, expected)
    assert_same_gradients(model, clone)


def test_constants_and_factories_follow_the_device():
    example = MODELS["masked_rotary"]()
    captured, plan = planned(example, 2)
    bound = split(captured, plan)[1].bind(example.model, device=torch.device("meta"))
    devices = [node.kwargs["device"] for node in bound.graph.nodes if "device" in node.kwargs]
    assert devices
    assert all(device == torch.device("meta") for device in devices)
