"""Stages that run a part of their forward again train bitwise as the plain model does, and call nothing of the user's twice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fxchimera.errors import FxChimeraError, PartitionError
from fxchimera.schedule.families import make_order
from tests.local.wrapped import reference, step, wrap
from tests.models import MODELS, Example
from tests.parity import assert_bitwise, assert_same_tensors, micro_batch_loop

MODES = ("selective", "full")
WIDTH = 6


def layer(body: Callable[[Any, Tensor], Tensor], **children: nn.Module) -> Callable[[], nn.Module]:
    """What builds a module that applies ``body(self, x)``."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, child in children.items():
                self.add_module(name, child)

        def forward(self, x: Tensor) -> Tensor:
            return body(self, x)

    return Layer


class Slope(torch.autograd.Function):
    """Saves its result, and a number that it computes in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        ctx.scale = 1.0 + y.shape[-1]
        return y * ctx.scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return gradient * ctx.scale * (1 - y * y)


class Counter(nn.Module):
    """Counts its calls, in a buffer and in Python."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.register_buffer("count", torch.zeros(()))
        self.buffer = buffer

    def forward(self, x: Tensor) -> Tensor:
        if self.buffer:
            self.count += 1
        else:
            self.calls += 1
        return torch.tanh(self.linear(x))


def written(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    y[..., :2] *= 0.5
    return F.relu_(y) + y.mul(2)


def drawn(self: Any, x: Tensor) -> Tensor:
    return x if random.random() < 0.5 else self.a(x)


def slope(self: Any, x: Tensor) -> Tensor:
    inner = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(self.a(inner).tanh().sum(), inner, create_graph=True)
    return self.a(x) + gradient


def cast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.a(x).tanh()


def hooked(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    y.register_hook(lambda gradient: gradient * 2)
    return y.tanh()


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def dropped() -> nn.Module:
    return nn.Sequential(linear(), nn.Dropout(0.3))


LAYERS: dict[str, Callable[[], Callable[[], nn.Module]]] = {
    "dropout": lambda: lambda: nn.Sequential(linear(), nn.GELU(), nn.Dropout(0.4)),
    "attention": lambda: layer(
        lambda m, x: m.a(x, x, x, need_weights=False)[0], a=nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)
    ),
    "lstm": lambda: layer(lambda m, x: m.a(x)[0], a=nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3, batch_first=True)),
    "in place": lambda: lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear(), nn.Dropout(0.2, inplace=True)),
    "written": lambda: layer(written, a=linear()),
    "drawn on the host": lambda: layer(drawn, a=linear()),
    "differentiates": lambda: layer(slope, a=linear()),
    "autocast": lambda: layer(lambda m, x: cast(m, x).float() + x, a=linear()),
    "custom function": lambda: layer(lambda m, x: Slope.apply(m.a(x)), a=linear()),
    "checkpoint": lambda: layer(lambda m, x: checkpoint(m.a, x, use_reentrant=False), a=dropped()),
    "old checkpoint": lambda: layer(lambda m, x: checkpoint(m.a, x, use_reentrant=True), a=dropped()),
    "transform": lambda: layer(lambda m, x: torch.func.grad(lambda y: y.pow(3).sum())(m.a(x)), a=linear()),
    "vmap": lambda: layer(lambda m, x: torch.vmap(m.a)(x), a=linear()),
    "tensor hook": lambda: layer(hooked, a=linear()),
    "weight norm": lambda: lambda: nn.Sequential(parametrizations.weight_norm(linear()), nn.Tanh()),
    "frozen": lambda: lambda: nn.Sequential(linear().requires_grad_(False), nn.GELU(), linear()),
    "batch norm": lambda: lambda: nn.Sequential(nn.Flatten(1), nn.Linear(4 * WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH),
                                                nn.ReLU(), nn.Unflatten(1, (4, WIDTH))),
    "buffer": lambda: lambda: Counter(buffer=True),
}  # fmt: skip


def example_of(name: str) -> Example:
    """Four of the layers between linear ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        build = [LAYERS[name]()() for _ in range(4)]
        model = nn.Sequential(linear(), *build, nn.LayerNorm(WIDTH), linear()).train()
        x, y = torch.randn(6, 4, WIDTH), torch.randn(6, 4, WIDTH)
    return Example(model, (x,), {}, y, F.mse_loss)


def trained(example: Example, mode: Any, schedule: Any = "chimera", n: int = 3) -> tuple[Any, dict[str, Tensor]]:
    example.model.zero_grad()
    before = {name: buffer.clone() for name, buffer in example.model.named_buffers()}
    with wrap(example, 2, n, schedule, recompute=mode) as pipe:
        found = step(pipe, example)
        after = {name: buffer.clone() for name, buffer in example.model.named_buffers()}
    for name, buffer in example.model.named_buffers():
        buffer.copy_(before[name])
    return found, after


@pytest.mark.parametrize(("name", "schedule"), list(zip(sorted(LAYERS), itertools.cycle(["chimera", "zbv"]), strict=False)))
def test_a_layer_trains_as_in_the_plain_model(name: str, schedule: str) -> None:
    """To the last bit, with the randomness that the reference gives the plain model; buffers as without recomputation."""
    example = example_of(name)
    schedule = "1f1b" if name == "buffer" else schedule  # two copies of a stage could not keep it
    expected, buffers = trained(example, "none", schedule)
    for mode in MODES:
        found, after = trained(example, mode, schedule)
        assert_bitwise(found, expected)
        assert_same_tensors(after, buffers)
    example.model.zero_grad()
    assert_bitwise(expected, reference(example, 2, 3, schedule))


@pytest.mark.parametrize(
    ("name", "mode"), [("gpt2", "selective"), ("resnet", "full"), ("nn_transformer", "full"), ("tied", ("none", "full"))]
)
def test_models_train_as_the_plain_loop_does(name: str, mode: Any) -> None:
    """Nothing of fxchimera is in the loop; one pipe, so that sums associate in the same way, and no ties but one."""
    example = MODELS[name](batch=4)
    expected = micro_batch_loop(example, 1)
    found, _ = trained(MODELS[name](batch=4), mode, "1f1b", n=1)
    if name == "tied":  # two uses of one weight are added in the order of the stages
        torch.testing.assert_close(found.gradients, expected.gradients)
    else:
        assert_bitwise(found, expected)


@pytest.mark.parametrize("mode", MODES)
def test_hooks_and_python_state_are_touched_once(mode: str) -> None:
    calls: list[str] = []
    example = Example(nn.Sequential(linear(), Counter(buffer=False), *[nn.Sequential(linear(), nn.GELU()) for _ in range(4)]),
                      (torch.randn(4, WIDTH),), {}, torch.randn(4, WIDTH), F.mse_loss)  # fmt: skip
    with wrap(example, 2, 2, "1f1b", recompute=mode) as pipe:
        step(pipe, example)
        counted = example.model[1].calls
        handle = example.model[3][0].register_forward_hook(lambda _, args, __: calls.append(type(args[0]).__name__))
        step(pipe, example)
        assert calls.count("Tensor") == 2  # one for each micro-batch; it is recorded once more, with the hook
        assert example.model[1].calls - counted == 2
        handle.remove()
        calls.clear()
        step(pipe, example)
        assert not calls
        assert any("calls" in why or "state" in why for stage in pipe.plan.stages for why in stage.kept_whole)


def test_every_forward_runs_twice_and_no_more() -> None:
    """A closed module counts its own calls outside of itself; deferred weight gradients do not ask again."""
    calls = []

    class Noted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if type(x) is Tensor:  # not while it is recorded
                calls.append(x.shape[0])
            return F.gelu(x)

    layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), Noted(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(8)]
    example = Example(nn.Sequential(*layers), (torch.randn(6, WIDTH),), {}, torch.randn(6, WIDTH), F.mse_loss)
    for mode, times in (("none", 1), ("full", 2)):
        for schedule in ("1f1b", "zbv"):
            with wrap(example, 2, 3, schedule, recompute=mode) as pipe:
                step(pipe, example)
                calls.clear()
                step(pipe, example)
            assert len(calls) == times * 8 * 3, (mode, schedule)


def test_evaluation_and_another_batch_size_keep_the_modes() -> None:
    example, smaller = MODELS["gpt2"](batch=4, dropout=0.1), MODELS["gpt2"](batch=2)
    with wrap(example, 2, 2, "1f1b", recompute="full") as pipe:
        step(pipe, example)
        pipe.eval()
        loss = pipe.evaluate(**smaller.kwargs)
        pipe.train()
        found = pipe.step(**smaller.kwargs)
    assert torch.isfinite(found)
    smaller.model.eval()
    assert torch.equal(loss, MODELS["gpt2"](batch=2).model.eval()(**smaller.kwargs).loss) or torch.isfinite(loss)


def test_a_cap_that_asks_for_recomputation() -> None:
    """Refused without, accepted with "auto", whose plan keeps the cap and trains the same; too little tells what was tried."""
    example = MODELS["gpt2"](batch=16, dropout=0.1)
    order = make_order("gpipe", 2, 4)  # holds all four
    with wrap(example, 2, 4, order, recompute="none") as pipe:
        plain = max(need.total for need in pipe.plan.memory)
        expected = step(pipe, example)
    cap = int(0.8 * plain)
    with pytest.raises(PartitionError, match=r'Use .*recompute="auto"'):
        wrap(example, 2, 4, order, recompute="none", memory=cap)
    example.model.zero_grad()
    with wrap(example, 2, 4, order, memory=cap) as pipe:
        assert max(need.total for need in pipe.plan.memory) <= cap
        modes = [stage.recompute for stage in pipe.plan.stages]
        assert set(modes) != {"none"}
        assert 'recomputes "' in str(pipe.plan)
        assert_bitwise(step(pipe, example), expected)
    with wrap(example, 2, 4, order, memory=plain) as pipe:
        assert {stage.recompute for stage in pipe.plan.stages} == {"none"}
    with pytest.raises(PartitionError, match=r"with the recomputation that was tried: stage \d"):
        wrap(example, 2, 4, order, memory=int(0.2 * plain))


@pytest.mark.parametrize("wrong", ["cheap", ("full", "auto"), (), ("none",) * 3])
def test_modes_that_are_none(wrong: Any) -> None:
    with pytest.raises(FxChimeraError, match="recompute"):
        wrap(MODELS["mlp"](), 2, 2, recompute=wrong)
