"""Modules that seed Python's or numpy's global generators themselves: they run alone, whatever state the seed leaves behind."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxchimera_passes.analytic import analytic
from fxchimera_passes.capture import capture, recapture
from fxchimera_passes.captured import RandomKey, info
from fxchimera_passes.keyed import HOST_ORDINAL, keyed_model, microbatch_randomness
from fxchimera_passes.stages import make_plan
from tests.graph.recorded import WIDTH, Wrapped, build, data
from tests.graph.staged import forward


def numpy_again() -> float:
    """Draw what was drawn the last time, and leave the generator as it was."""
    state = np.random.get_state()
    np.random.seed(7)
    drawn = float(np.random.rand())
    np.random.set_state(state)
    return drawn


def python_again() -> float:
    """Draw what was drawn the last time, and leave the generator as it was."""
    state = random.getstate()
    random.seed(7)
    drawn = random.random()
    random.setstate(state)
    return drawn


WAYS: dict[str, Callable[[], object]] = {
    "numpy": lambda: np.random.seed(0),
    "python": lambda: random.seed(0),
    "numpy, state put back": numpy_again,
    "python, state put back": python_again,
}


class Drawing(nn.Module):
    """A leaf that calls ``draw`` before its layer; may have a child."""

    def __init__(self, draw: Callable[[], object]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(WIDTH, WIDTH), draw

    def forward(self, x: Tensor) -> Tensor:
        drawn = self.draw()
        return self.layer(x) * (drawn if isinstance(drawn, float) else 1.0)


@pytest.mark.parametrize("way", WAYS)
def test_every_module_that_seeds_has_a_key(way: str) -> None:
    """All seed with one number, the one that a recording might begin with: no state differs from the one before."""
    model = build(lambda: nn.Sequential(*(Drawing(WAYS[way]) for _ in range(3))))
    captured = capture(model, (data(),), {})
    keys = [key for node in captured.graph.nodes for key in info(node).random]
    assert keys == [RandomKey(str(index), 0, HOST_ORDINAL) for index in range(3)]


@pytest.mark.parametrize("way", WAYS)
def test_an_opened_module_that_seeds_is_recorded_for_its_key(way: str) -> None:
    planned = capture(build(lambda: Wrapped(Drawing(WAYS[way]))), (data(),), {}, num_stages=8)
    assert planned.host_keys == (RandomKey("inner", 0, HOST_ORDINAL),)


def test_a_module_that_only_computes_has_no_key() -> None:
    captured = capture(build(lambda: nn.Sequential(*(Drawing(lambda: 0.5) for _ in range(3)))), (data(),), {})
    assert not any(info(node).random for node in captured.graph.nodes)


class Around(nn.Module):
    """Draws, lets a child draw, and draws again: normal numbers, which come in pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.children_that_draw = nn.ModuleList(Drawing(lambda: random.gauss(0, 1) * np.random.randn()) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children_that_draw:
            x = x * (1 + random.gauss(0, 1)) + np.random.randn()
            x = child(x)
        return x


def test_what_a_module_draws_takes_nothing_from_its_caller() -> None:
    model = build(Around)
    with microbatch_randomness(1, 2, 3):
        planned = capture(model, (data(),), {}, num_stages=4)
        captured = recapture(planned, (data(),), {}, training=True)
        (staged,), _ = forward(captured, make_plan(captured, analytic(captured), 4), model, [data()])
        keys = [key for node in captured.graph.nodes for key in info(node).random]
        with keyed_model(model, (*captured.host_keys, *keys)):
            whole = model(data())
        assert captured.host_keys == (RandomKey("", 0, HOST_ORDINAL),)
        assert len(keys) == 8
    assert torch.equal(staged, whole)
    assert not model._forward_hooks
    assert not model.children_that_draw[0]._forward_pre_hooks
