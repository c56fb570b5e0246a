"""How the recorder writes down torch functions: in-place writes, grad mode, autocast, custom autograd, checkpointing."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxchimera_passes.analytic import analytic
from fxchimera_passes.capture import capture, interpret, recapture
from fxchimera_passes.capture.targets import FunctionApply, after
from fxchimera_passes.captured import info
from fxchimera_passes.stages import make_plan, transfer
from tests.graph.recorded import Branch, Two, Wrapped, assert_same, build, check, data, find, pinned_together, position
from tests.graph.staged import forward


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


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_in_an_opened_forward_is_noted(reentrant):
    class Model(Two):
        def wave(self, x):
            return torch.tanh(x).sin()

        def between(self, x):
            for _ in range(2):
                x = checkpoint(self.wave, x, use_reentrant=reentrant)
            return x

    captured = check(build(Model))
    (note,) = captured.report.notes
    line = inspect.getsourcelines(Model.between)[1] + 2
    assert note.startswith(f"activation checkpointing at {__file__}:{line} saves no memory, as the calls of Model are recorded")


def test_checkpointing_in_a_closed_module_stays():
    class Saving(Branch):
        def forward(self, x):
            return checkpoint(self.branch, x, use_reentrant=False)

        def branch(self, x):
            y = self.layer(x)
            return y if y.sum().item() > 0 else -y  # a number, which keeps the module whole

    captured = check(build(lambda: Wrapped(Saving())))
    assert "inner" in captured.report.closed
    assert not any("checkpointing" in note for note in captured.report.notes)


def test_a_saved_tensor_hook_in_an_opened_forward_is_noted():
    class Model(Two):
        def between(self, x):
            with torch.autograd.graph.save_on_cpu():
                return torch.tanh(x)

    (note,) = check(build(Model)).report.notes
    assert note.startswith(f"a saved-tensor hook at {__file__}:")
    with torch.autograd.graph.save_on_cpu():  # the caller's own is the caller's business
        assert not check(build(Two)).report.notes


class Force(Two):
    """Differentiates inside the forward, whatever the caller's grad mode."""

    def between(self, x):
        with torch.no_grad():
            y = x * 2
            with torch.enable_grad():
                y.requires_grad_()
                (force,) = torch.autograd.grad(self.second(y).square().sum(), y)
        return x + force


@pytest.mark.parametrize("num_stages", [1, 2])
def test_gradients_enabled_in_a_forward_without_gradients(num_stages):
    model = build(Force)
    captured = check(model)
    plan = make_plan(captured, analytic(captured), num_stages)
    with torch.no_grad():
        bare = recapture(captured, (data(),), {}, training=True)
        assert not bare.grad_enabled
        assert torch.equal(interpret(bare, [data()])[0], model(data()))
        (found,), _ = forward(bare, transfer(captured, plan, bare), model, [data()])
        assert torch.equal(found, model(data()))
        assert not found.requires_grad
    with torch.inference_mode():
        assert not recapture(captured, (data(),), {}, training=False).grad_enabled
