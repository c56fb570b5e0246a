"""What happens around a backward in two parts: hooks, memory, and models that change their ways after the first micro-batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxchimera import FxChimeraError
from fxchimera.runtime.stages.deferral import Deferral
from fxchimera.runtime.stages.division import Division
from fxchimera.runtime.stages.observation import Observation
from tests.local.toys import chain, data, seeded, wrapped

WIDTH = 6

Parts = Callable[[nn.Module, Tensor], tuple[Tensor, Deferral | Division]]


class Token:
    """Something that dies with the graph that holds it."""


class Holding(torch.autograd.Function):
    """The identity, with a token in its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: list[Any]) -> Tensor:
        ctx.token = Token()
        tokens.append(weakref.ref(ctx.token))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def allowed(module: nn.Module, x: Tensor) -> frozenset[int]:
    with Observation() as observation:
        y = module(x)
    return observation.allowed([y], module.parameters())


def deferred(module: nn.Module, x: Tensor) -> tuple[Tensor, Deferral]:
    with Deferral(allowed(module, x)) as deferral:
        y = module(x)
    return y, deferral


def divided(module: nn.Module, x: Tensor) -> tuple[Tensor, Division]:
    with Observation() as observation:
        y = module(x)
    division = observation.division([y], observation.allowed([y], module.parameters()))
    assert division is not None
    return y, division


def hooked_run(parts: Parts | None, watched: str, waiting: int = 0) -> list[tuple[str, Tensor]]:
    """Forward and backward of two linears with hooks, on the results of ``watched`` ones too; ``waiting`` parameters wait."""
    seen: list[tuple[str, Tensor]] = []
    module = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    x = data(4)[0].requires_grad_()

    def watch(_module: nn.Module, _args: object, y: Tensor) -> None:
        y.register_hook(lambda gradient: (seen.append(("activation", gradient.clone())), gradient * 3)[1])

    for name, part in module.named_children():
        part.register_full_backward_hook(lambda _m, back, out, n=name: seen.extend([(n, back[0].clone()), (n, out[0].clone())]))
        part.register_full_backward_pre_hook(lambda _m, out, n=name: (out[0] * 2,))
        if name in watched:
            part.register_forward_hook(watch)
    if parts is None:
        y = module(x)
        y.backward(torch.ones_like(y))
    else:
        y, work = parts(module, x)
        seen.clear()
        work.input_part([y], [torch.ones_like(y)])
        assert len(work.parameters) == waiting
        assert all(p.grad is None for p in work.parameters)
        work.weight_part()
    return [*seen, *((name, p.grad) for name, p in module.named_parameters()), ("x", x.grad)]


@pytest.mark.parametrize(
    ("parts", "watched", "waiting"),
    [(deferred, "012", 4), (divided, "1", 4), (divided, "01", 2)],
    ids=["deferred", "divided", "divided, hooks between"],
)
def test_hooks_see_the_same_gradients_in_the_same_order(parts: Parts, watched: str, waiting: int) -> None:
    """Full backward hooks, backward pre-hooks that change the gradient, and hooks on activations that do."""
    ours, plain = hooked_run(parts, watched, waiting), hooked_run(None, watched)
    assert [name for name, _ in ours] == [name for name, _ in plain]
    assert len(plain) == len(watched) + 3 * 2 + 4 + 1
    for (name, a), (_, b) in zip(ours, plain, strict=True):
        assert torch.equal(a, b), name


def test_memory_goes_as_early_as_it_can() -> None:
    """I frees the graph around the operators, W the operators; nothing waits for the garbage collector."""
    tokens: list[Any] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(Holding.apply(self.a(x).tanh(), tokens))

    module = seeded(Model)
    x = data(4)[0].requires_grad_()
    ids = allowed(module, x)
    tokens.clear()
    deferral = Deferral(ids)
    with deferral:
        y = module(x)
    deferral.input_part([y], [torch.ones_like(y)])
    del y
    assert [token() for token in tokens] == [None]
    works = [weakref.ref(gradient) for _, gradient in deferral.waiting]
    assert len(works) == 2
    assert all(work() is not None for work in works)
    deferral.weight_part()
    assert [work() for work in works] == [None, None]
    assert deferral.waiting == []


class Moody(nn.Module):
    """A linear layer for one forward, and ``other(linear, x)`` from then on."""

    def __init__(self, other: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.other = other
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) if self.calls == 1 else self.other(self.linear, x)


def with_slope(linear: nn.Linear, x: Tensor) -> Tensor:
    y = linear(x)
    (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    return y + slope


def test_a_backward_inside_the_forward_that_comes_late_is_named() -> None:
    """It would give the parameters a gradient that nobody asked for in time."""
    module, x = seeded(lambda: Moody(with_slope)), data(4)[0].requires_grad_()
    ids = allowed(module, x)
    with pytest.raises(FxChimeraError, match=r"backward of its own inside its forward.*whole backwards"), Deferral(ids):
        module(x * 1)


def test_a_use_that_comes_late_is_added_all_the_same() -> None:
    """The bias is used by hand from the second micro-batch on: its gradient comes in two pieces, and is right."""
    module, x = seeded(lambda: Moody(lambda linear, x: linear(x) * linear.bias)), data(4)[0].requires_grad_()
    deferral = Deferral(allowed(module, x))
    with deferral:
        y = module(x)
    deferral.input_part([y], [torch.ones_like(y)])
    early = module.linear.bias.grad.clone()
    deferral.weight_part()
    got = module.linear.bias.grad
    module.zero_grad()
    module(x).sum().backward()
    assert early.abs().sum() > 0
    torch.testing.assert_close(got, module.linear.bias.grad)


def test_a_failed_step_leaves_nothing_behind() -> None:
    """The loss of the third micro-batch raises while weight parts wait: earlier gradients are back, and no graph is kept."""
    model = chain(4)
    x, y = data(8)
    failing = [False]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if failing[0] and torch.equal(target, y[4:6]):
            raise ValueError("a loss that fails")
        return (output - target).square().mean()

    with wrapped(model, x, loss_fn=loss_fn, num_stages=2, n_microbatches=4, schedule="zb-h1") as pipe:
        pipe.step(x, target=y)
        before = [p.grad.clone() for p in model.parameters()]
        failing[0] = True
        with pytest.raises(FxChimeraError, match="a loss that fails"):
            pipe.step(x, target=y)
        assert all(map(torch.equal, (p.grad for p in model.parameters()), before))
        replicas = [replica for executor in pipe._engine.executors for replica in executor.replicas.values()]
        assert [replica.in_flight for replica in replicas] == [0, 0]
