"""Costs: closed forms for linear layers, and measurements that leave no trace."""

from __future__ import annotations

import random

import numpy as np
import pytest
import sympy
import torch
from torch import Tensor, nn

from fxchimera_passes.capture import capture
from fxchimera_passes.captured import info
from fxchimera_passes.cost import analytic, measured, symbolic
from fxchimera_passes.errors import CaptureError
from tests.graph.traced import trace
from tests.models import MODELS


def by_target(captured, costs):
    return {str(node.target): costs[node.name] for node in captured.graph.nodes if node.name in costs}


def test_a_linear_layer_costs_its_flops_and_bytes():
    captured = capture(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)), (torch.randn(4, 8),), {})
    costs = analytic(captured, flops_per_second=100.0, bytes_per_second=1e30)
    assert by_target(captured, costs.forward) == pytest.approx({"0": 2 * 4 * 8 * 32 / 100, "1": 2 * 4 * 32 * 8 / 100})
    # the first layer's input needs no gradient
    assert by_target(captured, costs.backward) == pytest.approx({"0": 20.48, "1": 40.96})
    with pytest.raises(CaptureError, match="rates must be positive"):
        analytic(captured, flops_per_second=0.0)


@pytest.mark.parametrize(
    ("frozen", "factors"), [((), (1, 2, 2)), ((0,), (0, 1, 2)), ((0, 1), (0, 0, 1)), ((2,), (1, 2, 1)), ((0, 1, 2), (0, 0, 0))]
)
def test_frozen_layers_have_less_backward(frozen, factors):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for i in frozen:
        model[i].requires_grad_(False)
    captured = trace(model, torch.randn(2, 4))
    costs = analytic(captured)
    assert [costs.backward[n] / costs.forward[n] for n in costs.forward] == pytest.approx(factors)


def test_costs_are_affine_in_the_batch_size():
    examples = [MODELS["mlp"](batch=batch) for batch in (2, 6, 9)]
    small, large, third = (capture(example.model, example.args, example.kwargs) for example in examples)
    formulas = symbolic(small, large)
    flops, moved = formulas.totals()
    assert flops == formulas.batch * 2 * (15 * 16 * 16 + 16 * 5)
    assert moved.is_polynomial(formulas.batch)
    assert sympy.degree(moved, formulas.batch) == 1
    for node in third.graph.nodes:
        if node.name in formulas.flops:
            assert float(formulas.flops[node.name].subs(formulas.batch, 9)) == info(node).forward_flops
            assert float(formulas.moved_bytes[node.name].subs(formulas.batch, 9)) == info(node).moved_bytes


def test_recordings_that_do_not_match_are_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    two = trace(model, torch.randn(2, 4))
    with pytest.raises(CaptureError, match=r"differing sizes are \[\]"):
        symbolic(two, trace(model, torch.randn(2, 4)))
    with pytest.raises(CaptureError, match="3 and 4 nodes"):
        symbolic(trace(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)), two)
    with pytest.raises(CaptureError, match=r"differ at '_1'.*"):
        symbolic(two, _other())


def _other():
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, "0", nn.Linear(4, 4))
            self.end = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.end(getattr(self, "0")(x))

    return trace(Other(), torch.randn(3, 4))


def test_measured_costs_see_the_heavier_layer():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2048), nn.ReLU(inplace=True), nn.Linear(2048, 64))
    x = torch.randn(256, 64)
    captured = capture(model, (x,), {})
    costs = measured(captured, (x,), {}, repeats=5)
    forward, backward = by_target(captured, costs.forward), by_target(captured, costs.backward)
    assert all(seconds > 0 for seconds in (*forward.values(), *backward.values()))
    assert forward["1"] > 3 * forward["0"]
    assert backward["3"] > 3 * backward["0"]


@pytest.mark.parametrize("name", ["resnet", "gpt2", "nn_transformer"])
def test_measuring_leaves_no_trace(name):
    example = MODELS[name](dropout=0.1)
    captured = capture(example.model, example.args, example.kwargs, num_stages=2)
    for parameter in example.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    state = {key: value.clone() for key, value in example.model.state_dict().items()}
    buffers = {key: id(value) for key, value in example.model.named_buffers()}
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    costs = measured(captured, example.args, example.kwargs, repeats=1)
    assert set(costs.forward) == set(costs.backward) == set(analytic(captured).forward)
    assert all(torch.equal(value, state[key]) for key, value in example.model.state_dict().items())
    assert {key: id(value) for key, value in example.model.named_buffers()} == buffers
    assert all(bool((parameter.grad == 0.5).all()) for parameter in example.model.parameters())
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert np.array_equal(np.random.get_state()[1], generators[2])


def test_a_wrong_batch_is_named():
    x = torch.randn(2, 4)
    captured = trace(nn.Sequential(nn.Linear(4, 4)), x)
    with pytest.raises(CaptureError, match="holds 2 tensors, the recorded one held 1"):
        measured(captured, (x, x), {})
    with pytest.raises(CaptureError, match="repeats must be at least 1"):
        measured(captured, (x,), {}, repeats=0)
