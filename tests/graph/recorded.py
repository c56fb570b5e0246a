"""Captures a small model and compares it with the plain one; the pieces that the tests of the recorder share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxchimera_passes.capture import capture, interpret
from fxchimera_passes.captured import Captured
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


class Branch(nn.Module):
    """Branches on its own activations; has children, so it is opened when it is heavy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y if y.sum() > 0 else -y
