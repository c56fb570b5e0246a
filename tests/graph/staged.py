"""Runs the stages of a plan one after the other in one process, as a pipeline does: boundaries cut off from autograd."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxchimera_passes.analytic import analytic
from fxchimera_passes.capture import capture
from fxchimera_passes.captured import Captured, TensorMeta
from fxchimera_passes.plan import StagePlan
from fxchimera_passes.split import split
from fxchimera_passes.stages import make_plan
from fxchimera_passes.structure import flatten
from tests.models import MODELS, Example


@functools.cache
def recorded(name: str, num_stages: int, dropout: float = 0.0) -> Captured:
    """One recording of a zoo model (in double precision) for all tests, which read it and run it on models of their own."""
    example = MODELS[name](dtype=torch.float64, dropout=dropout)
    return capture(example.model, example.args, example.kwargs, num_stages=num_stages)


def planned(example: Example, num_stages: int, **options: Any) -> tuple[Captured, StagePlan]:
    """Record an example and cut it by analytic costs."""
    captured = capture(example.model, example.args, example.kwargs, num_stages=num_stages)
    return captured, make_plan(captured, analytic(captured), num_stages, **options)


def forward(captured: Captured, plan: StagePlan, root: nn.Module, inputs: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Any]]:
    """Run all stages; return the last one's tensors, and each boundary's sent tensors with their received leaves."""
    received: tuple[Tensor, ...] = ()
    boundaries = []
    sent: tuple[Tensor, ...] = ()
    for graph in split(captured, plan):
        sent = graph.bind(root)(*received, *(inputs[i] for i in graph.stage.inputs))
        if graph.stage.index == len(plan.stages) - 1:
            break
        for value, boundary in zip(sent, graph.stage.sent, strict=True):
            found = TensorMeta.of(value)
            assert (found.shape, found.dtype, found.requires_grad) == (
                boundary.meta.shape,
                boundary.meta.dtype,
                boundary.meta.requires_grad,
            ), boundary
        metas = [boundary.meta for boundary in graph.stage.sent]
        received = tuple(v.detach().clone().requires_grad_(m.requires_grad) for v, m in zip(sent, metas, strict=True))
        boundaries.append((sent, received))
    return sent, boundaries


def step(captured: Captured, plan: StagePlan, example: Example, root: nn.Module | None = None) -> tuple[Any, Tensor]:
    """Forward and backward through all stages; return the model's output and the loss (gradients are in the model)."""
    inputs, _ = flatten((example.args, example.kwargs))
    outputs, boundaries = forward(captured, plan, example.model if root is None else root, inputs)
    output = captured.out_structure.rebuild(outputs)
    loss = example.loss(output)
    loss.backward()
    for sent, received in reversed(boundaries):
        pairs = [(s, r.grad) for s, r in zip(sent, received, strict=True) if r.grad is not None]
        torch.autograd.backward([s for s, _ in pairs], [g for _, g in pairs])
    return output, loss


def plain(example: Example) -> tuple[Any, Tensor]:
    """Forward and backward of the model itself, without the cache that the recording leaves out too."""
    config = getattr(example.model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    output = example.model(*example.args, **example.kwargs)
    loss = example.loss(output)
    loss.backward()
    return output, loss


def assert_same_gradients(model: nn.Module, reference: nn.Module, tolerance: float = 1e-12) -> None:
    """Compare every gradient, relative to its norm with a floor of a thousandth of the norm of all gradients."""
    expected = dict(reference.named_parameters())
    total = torch.stack([p.grad.norm() for p in expected.values() if p.grad is not None]).norm()
    for name, parameter in model.named_parameters():
        if expected[name].grad is None:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        error = (parameter.grad - expected[name].grad).norm()
        assert error <= tolerance * max(expected[name].grad.norm(), 1e-3 * total), name


def assert_same_output(output: Any, reference: Any) -> None:
    """Bitwise equality of all tensors of two outputs."""
    found, expected = flatten(output)[0], flatten(reference)[0]
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
