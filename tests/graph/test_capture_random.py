"""Which random operations a recording names, torch's and those of Python and numpy."""

from __future__ import annotations

import functools
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxchimera_passes.analytic import analytic
from fxchimera_passes.capture import capture, interpret, recapture
from fxchimera_passes.capture.leaning import leaning
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


class Row(nn.Module):
    """Eight blocks of the same weight; each draws."""

    def __init__(self) -> None:
        super().__init__()
        self.jitters = nn.ModuleList(Jitter() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for jitter in self.jitters:
            x = jitter(x)
        return x


def test_a_module_that_draws_and_fits_in_a_stage_is_not_opened():
    captured = capture(build(Row), (data(),), {}, num_stages=4)
    assert "draws from random and numpy.random" in captured.report.closed["jitters.3"]
    assert info(find(captured, "jitters.3")[0]).random == (RandomKey("jitters.3", 0, HOST_ORDINAL),)
    assert captured.host_keys == ()


def test_a_module_that_draws_and_is_too_large_for_a_stage_holds_for_one_seed():
    model = build(lambda: Wrapped(Jitter()))
    key = RandomKey("inner", 0, HOST_ORDINAL)
    with microbatch_randomness(5, 6, 7):
        planned = capture(model, (data(),), {}, num_stages=8)
        captured = recapture(planned, (data(),), {}, training=True)
        (found,) = interpret(captured, [data()])
        assert all(guard.holds((data(),)) for guard in captured.guards)
    assert captured.host_keys == (key,)
    python, numpy = random.Random(seed_of(5, 6, 7, key)), np.random.RandomState(seed_of(5, 6, 7, key) % 2**32)
    assert torch.equal(found, (model.inner.layer(data()) * python.random() + numpy.rand()) * 2)
    with microbatch_randomness(5, 6, 8):
        assert not all(guard.holds((data(),)) for guard in captured.guards)


def test_a_root_that_draws_is_recorded_for_one_seed_and_says_so():
    class Model(Two):
        def between(self, x):
            return x if random.random() < 0.5 else -x

    model, key = build(Model), RandomKey("", 0, HOST_ORDINAL)
    signs = set()
    for microbatch in range(6):
        with microbatch_randomness(1, 0, microbatch):
            planned = capture(model, (data(),), {})
            captured = recapture(planned, (data(),), {}, training=True)
        sign = 1 if random.Random(seed_of(1, 0, microbatch, key)).random() < 0.5 else -1
        assert torch.equal(interpret(captured, [data()])[0], model.second(sign * model.first(data())))
        signs.add(sign)
    assert signs == {1, -1}
    (note,) = planned.report.notes
    assert "draws from random (before" in note
    assert "recorded.py:" in note
    assert "every micro-batch" in note


class Depth(nn.Module):
    """Leaves each layer out with a probability of 0.4; ``read`` turns a draw into a branch."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not eval(self.read):
                x = x + layer(x)
        return x


READS = ["torch.rand(1).item() < 0.4", "torch.rand(()) < 0.4", "0.4 > float(torch.rand(()))", "torch.rand(1).item() * 2 < 0.8"]


@pytest.mark.parametrize("read", READS)
def test_a_layer_left_out_at_random_follows_the_keyed_draw(read):
    model = build(Depth, read)
    paths = set()
    for microbatch in range(8):
        with microbatch_randomness(3, 1, microbatch):
            captured = capture(model, (data(),), {})
            again = recapture(captured, (data(),), {}, training=True)
            expected = data()
            kept = []
            for ordinal, layer in enumerate(model.layers):
                generator = torch.Generator().manual_seed(seed_of(3, 1, microbatch, RandomKey("", 0, ordinal)))
                if torch.rand(1, generator=generator) >= 0.4:
                    expected = expected + layer(expected)
                    kept.append(ordinal)
            assert torch.equal(interpret(again, [data()])[0], expected)
            assert all(guard.holds((data(),)) for guard in again.guards)
            # the plan is made for the path with every layer, which holds only for a micro-batch that keeps them all
            assert len({name for node in captured.graph.nodes for name in info(node).parameters}) == 8
            compared = "* 2" not in read and "float" not in read
            assert all(guard.holds((data(),)) for guard in captured.guards) == (len(kept) == 4 and compared)
        paths.add(tuple(kept))
    assert len(paths) > 2


HOST_READS = {
    "random.random() < 0.4": lambda seed: random.Random(seed).random,
    "random.uniform(1, 2) < 1.4": lambda seed: functools.partial(random.Random(seed).uniform, 1, 2),
    "np.random.rand() < 0.4": lambda seed: np.random.RandomState(seed % 2**32).rand,
    "np.random.uniform(low=1.0, high=2.0) < 1.4": lambda seed: functools.partial(np.random.RandomState(seed % 2**32).uniform, 1, 2),
}


@pytest.mark.parametrize("read", HOST_READS)
def test_a_layer_left_out_by_python_or_numpy_is_planned_for_and_follows_its_key(read):
    """The plan is for all layers, whatever the first micro-batch draws; a recording holds for its own draws."""
    model, states = build(Depth, read), (random.getstate(), np.random.get_state()[1].tobytes())
    paths = set()
    for microbatch in range(4):
        with microbatch_randomness(3, 1, microbatch):
            planned = capture(model, (data(),), {})
            again = recapture(planned, (data(),), {}, training=True)
            draw = HOST_READS[read](seed_of(3, 1, microbatch, RandomKey("", 0, HOST_ORDINAL)))
            kept = [index for index in range(4) if draw() >= (1.4 if "1" in read else 0.4)]
            expected = data()
            for index in kept:
                expected = expected + model.layers[index](expected)
            assert torch.equal(interpret(again, [data()])[0], expected)
            assert all(guard.holds((data(),)) for guard in again.guards)
            assert not all(guard.holds((data(),)) for guard in planned.guards)
            assert len({name for node in planned.graph.nodes for name in info(node).parameters}) == 8
        paths.add(tuple(kept))
    assert len(paths) > 1
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == states


def test_leaning_draws_are_this_threads_and_stop():
    originals = random.random, random.uniform, np.random.rand, np.random.uniform
    with leaning(0.25):
        assert (random.random(), random.uniform(2, 4), random.uniform(b=4.0, a=2.0)) == (0.25, 2.5, 2.5)
        assert np.array_equal(np.random.rand(2, 3), np.full((2, 3), 0.25))
        assert np.array_equal(np.random.uniform(2, 4, size=3), np.full(3, 2.5))
        elsewhere = ThreadPoolExecutor(1).submit(lambda: [random.random() for _ in range(4)]).result()
    assert len(set(elsewhere)) == 4
    assert (random.random, random.uniform, np.random.rand, np.random.uniform) == originals
    with leaning(None):
        assert random.random == originals[0]


def test_the_answer_to_a_comparison_is_guarded_not_the_number():
    model = build(Depth, READS[0])
    with microbatch_randomness(3, 1, 0):
        captured = recapture(capture(model, (data(),), {}), (data(),), {}, training=True)
    held = 0
    for microbatch in range(40):
        draws = [
            torch.rand(1, generator=torch.Generator().manual_seed(seed_of(3, 1, microbatch, RandomKey("", 0, k)))).item() < 0.4
            for k in range(4)
        ]
        with microbatch_randomness(3, 1, microbatch):
            holds = all(guard.holds((data(),)) for guard in captured.guards)
        assert holds == (draws == [guard.expected for guard in captured.guards])
        held += holds
    assert 1 < held < 40
