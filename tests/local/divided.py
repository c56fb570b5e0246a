"""Runs a module's backward whole and in two parts, micro-batch by micro-batch, so that tests can compare the bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxchimera.runtime.stages.deferral import Deferral
from fxchimera.runtime.stages.division import Division
from fxchimera.runtime.stages.observation import Observation
from fxchimera.runtime.stages.turns import Turns

__all__ = ["Divided", "allowed", "assert_same_bits", "divided", "in_parts", "waiting_for_w", "whole"]

Inputs = Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Divided:
    """Gradients of the parameters by name and of the inputs, and the names of the parameters that got theirs in W.

    ``first`` are those that did so already in the micro-batch that was looked at.
    """

    parameters: dict[str, Tensor | None]
    inputs: list[Tensor | None]
    deferred: set[str]
    first: set[str] = field(default_factory=set)


def whole(make: Callable[[], nn.Module], inputs: Inputs, surroundings: Callable[[], Any] = nullcontext) -> Divided:
    """The plain loop: forward and backward of one micro-batch after the other."""
    module = make()
    leaves = [_leaf(x) for x in inputs]
    for leaf in leaves:
        with surroundings():
            output = module(_entered(leaf))
        output.backward(_seed(output))
    return Divided({name: p.grad for name, p in module.named_parameters()}, [leaf.grad for leaf in leaves], set())


def divided(make: Callable[[], nn.Module], inputs: Inputs, surroundings: Callable[[], Any] = nullcontext) -> Divided:
    """All forwards, then I of each, ascending, then W of each, descending; micro-batch 0 is the one that is looked at."""
    module = make()
    names = {id(p): name for name, p in module.named_parameters()}
    leaves = [_leaf(x) for x in inputs]
    turns = Turns(range(len(leaves)), module.parameters())
    with surroundings(), Observation() as observation:
        outputs = [module(_entered(leaves[0]))]
    allowed = observation.allowed(outputs, module.parameters())
    first = observation.division(outputs, allowed) or Deferral(frozenset())
    modes = [first, *(Deferral(allowed) for _ in leaves[1:])]
    for leaf, mode in zip(leaves[1:], modes[1:], strict=True):
        with surroundings(), mode:
            outputs.append(module(_entered(leaf)))
    for microbatch, (mode, output) in enumerate(zip(modes, outputs, strict=True)):
        with turns.adding(microbatch, mode.parameters):
            mode.input_part([output], [_seed(output)])
    deferred = {names[id(p)] for mode in modes for p in mode.parameters}
    divided = {names[id(p)] for p in first.parameters}
    for microbatch, mode in reversed(list(enumerate(modes))):
        with turns.adding(microbatch):
            mode.weight_part()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return Divided(gradients, [leaf.grad for leaf in leaves], deferred, divided)


def allowed(make: Callable[[], nn.Module], module: nn.Module, x: Tensor) -> frozenset[int]:
    """The parameters of ``module`` that may be put off, found out on another one that is made in the same way."""
    twin = make()
    with Observation() as observation:
        output = twin(_entered(_leaf(x)))
    ids = observation.allowed([output], twin.parameters())
    own = dict(module.named_parameters())
    return frozenset(id(own[name]) for name, parameter in twin.named_parameters() if id(parameter) in ids)


def in_parts(make: Callable[[], nn.Module], x: Tensor) -> tuple[Divided, Divided]:
    """The gradients of one micro-batch after I, and after W; the first one's ``deferred`` are the parameters that wait then."""
    module, leaf = make(), _leaf(x)
    deferral = Deferral(allowed(make, module, x))
    with deferral:
        output = module(_entered(leaf))
    deferral.input_part([output], [_seed(output)])
    waiting = {id(parameter) for parameter in deferral.parameters}
    early = Divided(_copies(module), [leaf.grad], {name for name, p in module.named_parameters() if id(p) in waiting})
    deferral.weight_part()
    return early, Divided(_copies(module), [leaf.grad], set())


def waiting_for_w(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """A list that grows by one entry with every W that runs: the ids of the parameters that it gives gradients to."""
    waiting: list[list[int]] = []

    def note(weight_part: Callable[[Any], None]) -> Callable[[Any], None]:
        def noting(self: Any) -> None:
            waiting.append([id(parameter) for parameter in self.parameters])
            weight_part(self)

        return noting

    for parts in (Deferral, Division):
        monkeypatch.setattr(parts, "weight_part", note(parts.weight_part))
    return waiting


def _copies(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def assert_same_bits(ours: Divided, theirs: Divided) -> None:
    """Every gradient is there in both or in neither, and equal to the last bit."""
    for name, expected in [*theirs.parameters.items(), *enumerate(theirs.inputs)]:
        got = ours.parameters[name] if isinstance(name, str) else ours.inputs[name]
        assert (got is None) == (expected is None), name
        if got is not None and expected is not None:
            assert got.layout == expected.layout, name
            dense = [t.to_dense() if t.is_sparse else t for t in (got, expected)]
            assert torch.equal(*dense), f"{name}: off by {(dense[0] - dense[1]).abs().max()}"


def _leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_(x.is_floating_point() or x.is_complex())


def _entered(leaf: Tensor) -> Tensor:
    return leaf * 1 if leaf.requires_grad else leaf  # a non-leaf, as what a stage receives


def _seed(output: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(output.numel())
    return torch.randn(output.shape, generator=generator, dtype=output.dtype)
