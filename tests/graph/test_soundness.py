"""Smugglers: one module leaves a tensor somewhere, another picks it up; found in the recording, or at the latest in a run.

The check of runs is on in all tests of this folder (conftest.py).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxchimera_passes.analytic import analytic
from fxchimera_passes.capture import capture
from fxchimera_passes.errors import CaptureError
from fxchimera_passes.split import split
from fxchimera_passes.stages import make_plan
from tests.graph.recorded import WIDTH, build, data

BOX: list[Tensor] = []


def real(tensor: Tensor) -> bool:
    """Code that looks at the class of tensors takes another path in a recording."""
    return type(tensor) is Tensor


class Put(nn.Module):
    """Leaves what it computes where ``place`` is; unless ``always``, not in a recording."""

    def __init__(self, place: Any, always: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.place, self.always = place, always

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        if self.always or real(x):
            self.place(hidden * 2)
        return hidden


class Take(nn.Module):
    """Adds what it finds."""

    def __init__(self, place: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        found = self.place()
        return self.linear(x if found is None else x + found)


class Model(nn.Module):
    def __init__(self, put: Any, take: Any, always: bool) -> None:
        super().__init__()
        self.put, self.middle, self.take = Put(put, always), nn.Linear(WIDTH, WIDTH), Take(take)

    def forward(self, x: Tensor) -> Tensor:
        return self.take(self.middle(self.put(x)))


def through_a_global(always: bool) -> nn.Module:
    BOX.clear()
    return build(Model, lambda h: BOX.insert(0, h), lambda: BOX[0] if BOX else None, always)


class Parent:
    """Stands for a module that its children know (a child that is a module could not be its parent's parent)."""

    hidden: Tensor | None = None


def through_an_attribute_of_the_parent(always: bool) -> nn.Module:
    parent = Parent()
    return build(Model, lambda h: setattr(parent, "hidden", h), lambda: parent.hidden, always)


def through_a_hook(always: bool) -> nn.Module:
    seen: list[Tensor] = []
    model = build(Model, lambda h: None, lambda: seen[-1] if seen else None, always)

    def hook(module: nn.Module, args: Any, result: Tensor) -> None:
        if always or real(result):
            seen.append(result.sin())

    model.put.register_forward_hook(hook)
    return model


SMUGGLERS = pytest.mark.parametrize(
    "smuggler", [through_a_global, through_an_attribute_of_the_parent, through_a_hook], ids=lambda smuggler: smuggler.__name__
)


def staged(model: nn.Module, num_stages: int) -> Callable[[Tensor], Tensor]:
    """The stages of ``model``, one after the other; its children are kept whole."""
    captured = capture(model, (data(),), {}, num_stages=8, closed=[name for name, _ in model.named_children()])
    graphs = split(captured, make_plan(captured, analytic(captured), num_stages))
    modules = [graph.bind(model) for graph in graphs]

    def run(x: Tensor) -> Tensor:
        received: tuple[Tensor, ...] = ()
        for graph, module in zip(graphs, modules, strict=True):
            received = tuple(module(*received, *([x] if graph.stage.inputs else [])))
        return received[0]

    return run


@SMUGGLERS
def test_a_recording_finds_it_and_names_both_modules_and_the_line(smuggler: Callable[[bool], nn.Module]) -> None:
    line = inspect.getsourcelines(Take.forward)[1] + 2
    with pytest.raises(CaptureError) as caught:
        capture(smuggler(True), (data(),), {}, num_stages=8)
    message = str(caught.value)
    assert "Take (take) reads a tensor of shape (3, 4), made inside Put (put), that was not passed to it" in message
    assert f"test_soundness.py:{line}" in message


@SMUGGLERS
@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_run_finds_what_no_recording_saw(smuggler: Callable[[bool], nn.Module], num_stages: int) -> None:
    """With one stage the result would even be right, until somebody cuts the model."""
    line = inspect.getsourcelines(Take.forward)[1] + 2
    model = smuggler(False)
    with pytest.raises(CaptureError) as caught:
        staged(model, num_stages)(data())
    message = str(caught.value)
    last, first = num_stages - 1, 0
    assert f"Take (take) in stage {last} reads a tensor of shape (3, 4) at {__file__}:{line}" in message
    assert f"that Put (put) in stage {first} made and that was not passed to it" in message


def test_a_module_that_returns_anothers_tensor_as_it_is() -> None:
    class Return(nn.Module):
        def __init__(self, always: bool) -> None:
            super().__init__()
            self.linear, self.always = nn.Linear(WIDTH, WIDTH), always

        def forward(self, x: Tensor) -> Tensor:
            return BOX[0] if BOX and (self.always or real(x)) else self.linear(x)

    for always, found in ((True, "made inside Put"), (False, "Put (0) in stage 0 made")):
        BOX.clear()
        model = build(lambda always=always: nn.Sequential(Put(lambda h: BOX.insert(0, h), always), nn.Tanh(), Return(always)))
        with pytest.raises(CaptureError, match=r"Return \(2\)") as caught:
            staged(model, 2)(data())
        assert found in str(caught.value)


def test_a_custom_function_that_reads_what_it_was_not_given() -> None:
    class Secret(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x + BOX[0]

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.put = Put(lambda h: BOX.insert(0, h), True)

        def forward(self, x: Tensor) -> Tensor:
            return Secret.apply(self.put(x))

    BOX.clear()
    with pytest.raises(CaptureError, match=r"Secret.apply reads a tensor .* made inside Put \(put\), that was not passed to it"):
        capture(build(Uses), (data(),), {}, num_stages=8)


TABLE = torch.arange(WIDTH, dtype=torch.float64)


class Honest(nn.Module):
    """Reads constants, its own state, a table made at its first call, views of its argument, and writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.free = torch.ones(WIDTH, dtype=torch.float64)
        self.options = {"table": torch.full((WIDTH,), 2.0, dtype=torch.float64)}

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x[:, :]) + TABLE * self.free)
        y[0] += self.options["table"]
        return y.view(-1, WIDTH)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_constants_state_and_views_are_free(num_stages: int) -> None:
    model = build(lambda: nn.Sequential(*(Honest() for _ in range(3))))
    plain = copy.deepcopy(model)
    run = staged(model, num_stages)
    for _ in range(3):
        found, expected = run(data()), plain(data())
        assert torch.equal(found, expected)
    found.sum().backward()
