"""Which random operations a recording names, torch's and those of Python and numpy."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxchimera_passes.analytic import analytic
from fxchimera_passes.capture import capture, interpret
from fxchimera_passes.captured import RandomKey, info
from fxchimera_passes.keyed import HOST_ORDINAL, keyed_model, microbatch_randomness, seed_of
from fxchimera_passes.stages import make_plan
from tests.graph.recorded import WIDTH, Two, Wrapped, build, data, find
from tests.graph.staged import forward


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x[None, None]
        return F.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout)


@pytest.mark.parametrize(("dropout", "keys"), [(0.0, ()), (0.5, (RandomKey("0", 0, 0),))])
def test_attention_is_random_only_with_dropout(dropout, keys):
    # torch tags the kernel as random in both cases
    captured = capture(nn.Sequential(Attention(dropout)), (torch.randn(3, WIDTH),), {})
    (node,) = find(captured, "0")
    assert info(node).random == keys
    assert ("random" in info(node).depends) == bool(keys)


class Jitter(nn.Module):
    """Draws from Python's and numpy's global generators; has a child, so that it may be opened."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * random.random() + np.random.rand()


class Jittered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.jitters = nn.ModuleList(Jitter() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for jitter in (*self.jitters, self.jitters[0]):
            x = jitter(x)
        return x


JITTERS = [
    RandomKey("jitters.0", 0, HOST_ORDINAL),
    RandomKey("jitters.1", 0, HOST_ORDINAL),
    RandomKey("jitters.0", 1, HOST_ORDINAL),
]


def test_a_leaf_that_draws_from_python_or_numpy_gets_a_key():
    model = build(Jittered)
    states = random.getstate(), np.random.get_state()[1].tobytes()
    captured = capture(model, (data(),), {})
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == states
    assert [key for node in captured.graph.nodes for key in info(node).random] == JITTERS
    assert captured.report.notes == ()
    with microbatch_randomness(5, 6, 7):
        (found,) = interpret(captured, [data()])
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == states
    expected = data()
    for index, key in zip((0, 1, 0), JITTERS, strict=True):
        python, numpy = random.Random(seed_of(5, 6, 7, key)), np.random.RandomState(seed_of(5, 6, 7, key) % 2**32)
        expected = model.jitters[index].layer(expected) * python.random() + numpy.rand()
    assert torch.equal(found, expected)


def test_stages_and_the_whole_model_draw_the_same():
    model = build(Jittered)
    captured = capture(model, (data(),), {}, num_stages=2)
    keys = [key for node in captured.graph.nodes for key in info(node).random]
    with microbatch_randomness(1, 2, 3):
        (staged,), _ = forward(captured, make_plan(captured, analytic(captured), 2), model, [data()])
        with keyed_model(model, keys):
            whole = model(data())
    assert torch.equal(staged, whole)
    assert not model.jitters[0]._forward_pre_hooks


def test_a_module_that_draws_is_not_opened():
    model = build(lambda: Wrapped(Jitter()))
    captured = capture(model, (data(),), {}, num_stages=8)
    assert "draws from random and numpy.random" in captured.report.closed["inner"]
    assert info(find(captured, "inner")[0]).random == (RandomKey("inner", 0, HOST_ORDINAL),)


def test_a_root_that_draws_is_noted():
    class Model(Two):
        def between(self, x):
            return x if random.random() < 2 else -x

    captured = capture(build(Model), (data(),), {})
    (note,) = captured.report.notes
    assert "own forward draws from random, before" in note
    assert "recorded.py:" in note
    assert not any(info(node).random for node in captured.graph.nodes)
