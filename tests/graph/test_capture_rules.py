"""One test for each rule of the recorder, on the smallest model that needs it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from fxchimera_passes.capture import capture, interpret, recapture
from fxchimera_passes.capture.targets import FunctionApply, after, reached, rebuild
from fxchimera_passes.captured import Captured, info
from fxchimera_passes.errors import CaptureError
from fxchimera_passes.structure import flatten

WIDTH = 4
RECORDINGS = 2  # one to measure, one to keep


def build(cls: Callable[..., nn.Module], *args: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return cls(*args).double()


def data(rows: int = 3) -> Tensor:
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def check(model: nn.Module, *args: Any, stages: int = 8) -> Captured:
    """Capture ``model`` and compare outputs, gradients and buffers with the plain model, bit for bit."""
    args = args or (data(),)
    captured = capture(model, args, {}, num_stages=stages)
    assert_same(captured, *args)
    return captured


def assert_same(captured: Captured, *args: Any, **kwargs: Any) -> None:
    plain, ours = copy.deepcopy(captured.model), captured.model
    given, structure = flatten((args, kwargs))
    expected_inputs, inputs = ([tensor.clone() for tensor in given] for _ in range(2))
    plain_args, plain_kwargs = structure.rebuild(expected_inputs)
    expected = flatten(plain(*plain_args, **plain_kwargs))[0]
    found = interpret(captured, inputs)
    assert len(expected) == len(found)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    for tensors in (expected, found):
        sum(tensor.square().sum() for tensor in tensors if tensor.requires_grad).backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name
    for (name, a), (_, b) in zip(plain.named_buffers(), ours.named_buffers(), strict=True):
        assert torch.equal(a, b), name
    ours.zero_grad()


def find(captured: Captured, target: Any) -> list[fx.Node]:
    return [node for node in captured.graph.nodes if node.target == target]


def position(captured: Captured, node: fx.Node) -> int:
    return list(captured.graph.nodes).index(node)


def pinned_together(captured: Captured, a: fx.Node, b: fx.Node) -> bool:
    return any(lo <= position(captured, a) and position(captured, b) <= hi for lo, hi in captured.pinned)


class Two(nn.Module):
    """Two linear layers; subclasses put something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def between(self, x: Tensor) -> Any:
        return x

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return self.second(self.between(self.first(x), *rest))


class Wrapped(nn.Module):
    """A model whose only large child is ``inner``, so that it gets opened."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner(*args) * 2


# ---- in-place writes


def test_a_read_after_a_write_depends_on_the_write():
    class Model(Two):
        def between(self, x):
            y = x * 2
            y.add_(1.0)
            y[:, 0] = 0.0
            y.mul_(3.0)
            return y + 1

    captured = check(build(Model))
    edges = find(captured, after)
    assert len(edges) == 1
    assert edges[0].args[1].target.__name__ == "setitem"
    assert pinned_together(captured, edges[0].args[1], edges[0])


def test_an_alias_older_than_a_write_pins_the_range_to_its_reader():
    class Model(Two):
        def between(self, x):
            base = x * 2
            row = base[0]
            row.zero_()
            return torch.relu(base)

    captured = check(build(Model))
    (made,), (reader,) = find(captured, "mul") or [find(captured, torch.mul)[0]], find(captured, torch.relu)
    assert find(captured, "zero_"), "a write with no reader of its own result must stay"
    assert pinned_together(captured, made, reader)


def test_writing_through_out_and_data():
    class Model(Two):
        def between(self, x):
            y = torch.empty_like(x.detach())
            torch.exp(x.detach(), out=y)
            y.data.add_(1.0)
            return x + y

    check(build(Model))


def test_in_place_activation_inside_a_closed_module():
    class Model(Two):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU(inplace=True)

        def between(self, x):
            y = x + 1
            self.act(y)
            return y * 2

    captured = check(build(Model))
    (act,) = find(captured, "act")
    assert [node.name for node in act.users] == ["mul"]


# ---- grad mode, autocast, custom functions


def test_no_grad_region():
    class Model(Two):
        def between(self, x):
            with torch.no_grad():
                scale = x.abs().mean()
            return x / scale

    captured = check(build(Model))
    outside = {node.name: info(node).grad_enabled for node in captured.graph.nodes if node.op != "output"}
    assert not outside["mean"]
    assert not outside["abs_1"]
    assert outside["truediv"] if "truediv" in outside else all(outside[n] for n in outside if "div" in n)
    assert info(find(captured, "mean")[0]).value.requires_grad is False


def test_autocast_region():
    class Model(Two):
        def forward(self, x):
            x = self.first(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.second(x)
            return x.float()

    model = Model()
    captured = capture(model, (data().float(),), {}, num_stages=4)
    assert_same(captured, data().float())
    first, second = find(captured, "first")[0], find(captured, "second")[0]
    assert info(first).autocast is None
    assert info(second).autocast == ("cpu", torch.bfloat16, True)
    assert info(second).value.dtype is torch.bfloat16


class StraightThrough(torch.autograd.Function):
    """Rounds forward, passes twice the gradient backward: differentiating through the forward would give zero."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def test_custom_function_keeps_its_backward():
    class Model(Two):
        def between(self, x):
            return StraightThrough.apply(x, 2.0)

    captured = check(build(Model))
    assert [node.target.function for node in captured.graph.nodes if isinstance(node.target, FunctionApply)] == [StraightThrough]


def test_gradient_inside_the_forward_is_pinned():
    class Model(Two):
        def between(self, x):
            energy = self.second(x).square().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    captured = check(build(Model))
    node = find(captured, torch.autograd.grad)[0]
    assert pinned_together(captured, min(node.all_input_nodes, key=lambda n: position(captured, n)), node)


def test_checkpointing_in_an_opened_forward():
    class Model(Two):
        def between(self, x):
            x = checkpoint(torch.tanh, x, use_reentrant=False)
            return checkpoint(torch.sin, x, use_reentrant=True)

    captured = check(build(Model))
    assert any("activation checkpointing" in note for note in captured.report.notes)


# ---- values read into Python


class Masked(Two):
    def between(self, x, mask):
        if mask.all():
            return x
        return x * mask[:, None]


def test_a_branch_on_an_input_is_a_guard():
    full, part = torch.ones(3), torch.tensor([1.0, 0.0, 1.0])
    captured = check(build(Masked), data(), full)
    (guard,) = captured.guards
    assert guard.expected is True
    assert guard.line.startswith(__file__)
    assert guard.holds((data(), full))
    assert guard.holds((data(5), torch.ones(5)))
    assert not guard.holds((data(), part))
    other = recapture(captured, (data(), part), {}, training=True)
    assert_same(other, data(), part)
    assert not other.guards[0].holds((data(), full))


def test_a_guard_replays_writes_and_leaves_the_batch_alone():
    class Model(Two):
        def between(self, x, mask):
            counts = mask.clone()
            counts[0].add_(5)
            mask.add_(1)
            return x * int(counts.sum()) + int(mask.sum())

    mask = torch.zeros(3, dtype=torch.long)
    captured = check(build(Model), data(), mask)
    assert torch.equal(mask, torch.zeros(3, dtype=torch.long))
    assert [guard.expected for guard in captured.guards] == [5, 3]
    assert all(guard.holds((data(), mask)) for guard in captured.guards)
    assert torch.equal(mask, torch.zeros(3, dtype=torch.long))


def test_a_value_that_depends_on_nothing_needs_no_guard():
    class Model(Two):
        def between(self, x):
            return x * int(torch.arange(4).sum())

    captured = check(build(Model))
    assert captured.guards == ()


@pytest.mark.parametrize("read", ["x.sum() > 0", "torch.rand(()) > 2", "self.first.weight.sum().item() > 0"])
def test_a_branch_on_parameters_or_chance_at_the_root_is_refused(read):
    class Model(Two):
        def between(self, x):
            if eval(read):
                return x
            return -x

    with pytest.raises(CaptureError, match=r"rules\.py:\d+: (bool|item)\(\) reads a value that depends on .*submodule"):
        capture(build(Model), (data(),), {})


class Branch(nn.Module):
    """Branches on its own activations; has children, so it is opened when it is heavy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y if y.sum() > 0 else -y


def test_a_branch_in_a_submodule_keeps_it_whole():
    captured = check(build(lambda: Wrapped(Branch())))
    assert "inner" not in captured.open_modules
    assert "depends on" in captured.report.closed["inner"]
    assert find(captured, "inner")


def test_a_value_needed_for_a_shape_keeps_the_module_whole():
    class Select(Branch):
        def forward(self, x):
            y = self.layer(x)
            return y * y[y > 0].mean()

    captured = check(build(lambda: Wrapped(Select())))
    assert "inner" in captured.report.closed


def test_iterating_over_rows():
    class Model(Two):
        def between(self, x):
            return torch.stack([row * index for index, row in enumerate(x)])

    check(build(Model))


# ---- modules


def test_data_dependent_leaf_runs_for_real_also_without_weights():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x):
            choice, out = self.router(x).argmax(-1), torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows = (choice == index).nonzero().squeeze(-1)
                if rows.numel():
                    out = out.index_add(0, rows, expert(x[rows]))
            return out

    model = build(lambda: Wrapped(Experts()))
    captured = check(model)
    hollow = capture(copy.deepcopy(model).to("meta"), (data(),), {}, num_stages=8)
    assert str(hollow.graph) == str(captured.graph)


def test_a_module_that_keeps_python_state_is_named():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls, self.log = nn.Linear(WIDTH, WIDTH), 0, []

        def forward(self, x):
            self.calls += 1
            self.log.append(self.calls)
            return self.layer(x)

    model = build(lambda: Wrapped(Counting()))
    captured = check(model)
    assert captured.report.stateful == {"inner": ("calls", "log")}
    assert "inner" not in captured.open_modules
    assert model.inner.calls == 1, "one real run, none from the recording"


def test_buffers_written_by_batch_norm_are_listed():
    class Model(Two):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def between(self, x):
            return self.norm(x)

    captured = check(build(Model))
    wanted = {"norm.num_batches_tracked", "norm.running_mean", "norm.running_var"}
    assert {name for node in captured.graph.nodes if node.op != "output" for name in info(node).writes} == wanted
    assert set(info(find(captured, "norm")[0]).buffers) == wanted


@pytest.mark.parametrize("inside", [False, True])
def test_a_buffer_rebound_in_the_forward(inside):
    class Average(Two):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def between(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x - self.mean

    model = build(lambda: Wrapped(Average())) if inside else build(Average)
    captured = check(model)
    writes = [info(node).writes for node in captured.graph.nodes if node.op != "output" and info(node).writes]
    assert writes == [("inner.mean" if inside else "mean",)]


def test_a_parameter_read_outside_its_module():
    class Model(Two):
        def between(self, x):
            return F.linear(x, self.second.weight) + x * self.first.weight.norm()

    check(build(Model))


def test_a_leaf_that_reads_a_parameter_of_another_module():
    class Head(nn.Module):
        def __init__(self, owner):
            super().__init__()
            self.owner = [owner]

        def forward(self, x):
            return F.linear(x, self.owner[0].weight)

    class Model(Two):
        def __init__(self):
            super().__init__()
            self.head = Head(self.first)

        def between(self, x):
            return self.head(x)

    captured = capture(build(Model), (data(),), {})
    assert info(find(captured, "head")[0]).parameters == ("first.weight",)


def test_an_unregistered_parameter_is_refused():
    class Model(Two):
        def __init__(self):
            super().__init__()
            self.hidden = [torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)]

        def between(self, x):
            return x * self.hidden[0]

    with pytest.raises(CaptureError, match=r"register it with nn\.Parameter"):
        capture(build(Model), (data(),), {})


def test_a_module_with_hooks_stays_whole_and_runs_them():
    model = build(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Two()))
    calls: list[int] = []
    model[1].register_forward_hook(lambda module, args, output: calls.append(1) or output + 1)
    model[1].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 3,))
    captured = check(model)
    assert captured.open_modules == {""}
    assert len(calls) == 2 + RECORDINGS, "the plain model, the graph, and the recordings"


def test_a_torch_func_transform_keeps_the_module_whole():
    class Vmapped(Branch):
        def forward(self, x):
            return torch.vmap(lambda row: row * row.sum())(self.layer(x))

    assert "inner" in check(build(lambda: Wrapped(Vmapped()))).report.closed


def test_recurrent_layers():
    class Model(Two):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

        def between(self, x):
            return self.rnn(x[None])[0][0]

    model = build(Model)
    captured = check(model)
    # two layers, each 2 * rows * (4*hidden*input + 4*hidden*hidden) multiply-adds
    assert info(find(captured, "rnn")[0]).forward_flops == 2 * (2 * 3 * 4 * WIDTH * 2 * WIDTH)
    assert str(capture(copy.deepcopy(model).to("meta"), (data(),), {}, num_stages=8).graph) == str(captured.graph)


# ---- objects between modules


@dataclass
class State:
    hidden: Tensor
    extra: Any
    step: int


def test_dataclass_none_and_dict_between_modules():
    class Maker(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return State(self.layer(x), {"twice": 2 * x, "nothing": None}, 3)

    class Taker(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, state, mask=None):
            return {"out": self.layer(state.hidden) * state.step + state.extra["twice"], "mask": mask}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.maker, self.taker, self.last = Maker(), Taker(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            state = self.maker(x)
            return {"y": self.last(self.taker(state, mask=None)["out"]), "state": state}

    captured = check(build(Model), stages=1)
    (made,) = find(captured, rebuild)
    (user,) = find(captured, "taker")
    assert pinned_together(captured, made, user)
    built = captured.out_structure.rebuild(interpret(captured, [data()]))
    assert isinstance(built["state"], State)
    assert built["state"].step == 3
    assert built["state"].extra["nothing"] is None


def test_containers_filled_by_a_call_are_read_back():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, cache):
            cache["all"].append(self.layer(x))
            return cache["all"][-1] * len(cache["all"])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x):
            cache: dict[str, list[Tensor]] = {"all": []}
            for layer in self.layers:
                x = layer(x, cache)
            return x, sum(cache["all"])

    captured = check(build(Model), stages=1)
    assert len(find(captured, reached)) >= 3
    assert_same(captured, data())  # a second micro-batch gets containers of its own


def test_a_tensor_that_leaves_by_a_side_channel_opens_its_module():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = nn.Linear(WIDTH, WIDTH), []

        def forward(self, x):
            y = self.layer(x)
            self.seen[0].append(y * 2)
            return y

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = Inner(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            bag: list[Tensor] = []
            object.__setattr__(self.inner, "seen", self.inner.seen)
            self.inner.seen[:] = [bag]
            y = self.last(self.inner(x))
            self.inner.seen.clear()
            return y + bag[0]

    captured = check(build(Model), stages=1)
    assert "side" in captured.report.opened["inner"] or "not part of its result" in captured.report.opened["inner"]


def test_a_tensor_smuggled_between_modules_is_refused_at_the_root():
    box: list[Tensor] = []

    class Put(nn.Module):
        def forward(self, x):
            box[:] = [x * 2]
            return x

    class Take(nn.Module):
        def forward(self, x):
            return x + box[0]

    with pytest.raises(CaptureError, match=r"Take reads a tensor of shape .* that was not passed to it"):
        capture(nn.Sequential(Put(), nn.Linear(WIDTH, WIDTH).double(), Take()), (data(),), {})


def test_hidden_states_of_a_transformers_model():
    from tests.models import MODELS

    example = MODELS["bert"](dtype=torch.float64)
    kwargs = {**example.kwargs, "output_hidden_states": True}
    captured = capture(example.model, example.args, kwargs, num_stages=4)
    assert_same(captured, *example.args, **kwargs)


# ---- errors of the user


def test_a_model_that_fails_by_itself_says_so():
    class Model(Two):
        def between(self, x):
            return x @ torch.ones(7, 2, dtype=x.dtype)

    with pytest.raises(CaptureError, match=r"test_capture_rules\.py:\d+: it raised RuntimeError"):
        capture(build(Model), (data(),), {})


def test_lazy_parameters_and_backward_hooks_on_the_root_are_refused():
    with pytest.raises(CaptureError, match="run one forward"):
        capture(nn.Sequential(nn.LazyLinear(3)), (data(),), {})
    model = build(Two)
    model.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    with pytest.raises(CaptureError, match="backward hooks"):
        capture(model, (data(),), {})


# ---- cost


def test_flops_and_bytes_of_a_linear_layer():
    captured = capture(build(lambda: nn.Sequential(nn.Linear(WIDTH, 6))), (data(),), {})
    (node,) = find(captured, "0")
    assert info(node).forward_flops == 2 * 3 * WIDTH * 6
    assert info(node).moved_bytes == 8 * (3 * WIDTH + WIDTH * 6 + 6 + 3 * 6)


def test_flops_of_attention_on_a_cpu():
    class Model(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k)

    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
    captured = capture(Model(), (q, k), {})
    (node,) = find(captured, F.scaled_dot_product_attention)
    assert info(node).forward_flops == 2 * 2 * 3 * (5 * 7 * 4) * 2
    assert math.prod(info(node).value.shape) == q.numel()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this host has a device besides the CPU")
def test_a_device_that_this_host_lacks_is_refused():
    with pytest.raises(CaptureError, match="recorded for cuda: this host has only cpu"):
        capture(build(Two).to("meta"), (data(),), {}, device=torch.device("cuda"))
