"""Stages that sleep are timed as long as they sleep, and the model is left as it was."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxchimera
from fxchimera.runtime.stages.operators import splittable
from fxchimera.runtime.steps.stagetimes import Sample, time_stage
from fxchimera.schedule.measurement import StageTimes
from tests.local.toys import data, seeded, wrapped
from tests.parity import assert_same_tensors
from tests.sleeping import BACKWARD, FORWARD, Sleep

SLACK = 0.1  # machines are shared; the bounds from below are the sharp ones


def timed(pipe: Any, inputs: Sequence[Tensor], loss: Any = None, rounds: int = 3) -> list[StageTimes]:
    """Time the stages of a pipeline one after the other, each on what the one before sends."""
    program, received, found = pipe._preparation._programs.first, [], []
    sample = Sample(program=program, inputs=inputs, loss=loss, rounds=rounds)
    for executor in pipe._engine.executors:
        for replica in executor.replicas.values():
            passage = time_stage(replica, sample, received)
            found.append(passage.times)
            received = passage.outputs
    return found


@splittable
def slow(x: Tensor, weight: Tensor) -> Tensor:
    """A kernel of one's own: as slow for the input's gradient as for the weight's."""
    return Sleep.apply(x, 1.0) @ Sleep.apply(weight, 1.0)


class Kernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6))

    def forward(self, x: Tensor) -> Tensor:
        return slow(x, self.weight)


class Normed(nn.Module):
    """Nothing to defer for W but a linear layer's and batch norm's."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear, self.norm, self.factor = nn.Linear(6, 6), nn.BatchNorm1d(6), factor

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(Sleep.apply(x, self.factor)))


def test_sleeping_stages() -> None:
    """The second sleeps three times as long; what no operator defers counts for I."""
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 6), Normed(1.0), Normed(3.0)))
    x, y = data(8)
    with wrapped(model, x, num_stages=2, n_microbatches=1, schedule="1f1b", split_points=["2"]) as pipe:
        pipe.step(x, target=y)
        before = copy.deepcopy(model.state_dict())
        gradients = [p.grad.clone() for p in model.parameters()]
        found = timed(pipe, [x], lambda out: (out[0] - y).square().mean())
        assert_same_tensors(model.state_dict(), before)
        assert all(map(torch.equal, (p.grad for p in model.parameters()), gradients))
    assert len(found) == 2
    for times, factor in zip(found, (1.0, 3.0), strict=True):
        assert FORWARD * factor <= times.forward <= FORWARD * factor + SLACK
        assert FORWARD * factor <= times.split_forward <= FORWARD * factor + SLACK
        assert BACKWARD * factor <= times.backward <= BACKWARD * factor + SLACK
        assert BACKWARD * factor <= times.input_grad <= BACKWARD * factor + SLACK
        assert 0 < times.weight_grad < times.input_grad


def watched(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every sleep of a backward from now on."""
    slept: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds)) if seconds == BACKWARD else None)
    return slept


def test_an_operator_of_ones_own_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """B sleeps for both gradients, I and W for one each; the step has the bits of the reference."""
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 6), Kernel()))
    x, y = data(8)
    expected = fxchimera.reference(model, x, target=y, loss_fn=F.mse_loss, num_stages=2, n_microbatches=4, schedule="zb-h1")
    with wrapped(model, x, num_stages=2, n_microbatches=4, schedule="zb-h1", split_points=["1"]) as pipe:
        pipe.step(x, target=y)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, expected.gradients[name])
        slept = watched(monkeypatch)
        times = timed(pipe, [x[:2]])[1]
    assert 2 * BACKWARD <= times.backward <= 2 * BACKWARD + SLACK
    assert BACKWARD <= times.input_grad <= BACKWARD + SLACK
    assert BACKWARD <= times.weight_grad <= BACKWARD + SLACK
    wholes, parts = 4, 4  # of the rounds, one more than counted
    assert len(slept) == 2 * wholes + 2 * parts  # neither part computed both
