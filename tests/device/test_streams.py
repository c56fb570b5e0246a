"""Real steps under vector clocks: no stream reads or overwrites what another may still be at, and each planted fault is caught."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import fxchimera
from fxchimera.errors import PipelineError
from tests.device.leftout import Faulty
from tests.device.models import Blocks, Tied, batch
from tests.device.twin import DEVICES

TURN = [DEVICES[rank % 2] for rank in range(4)]


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    torch.ops.twin.check(True)
    yield
    torch.ops.twin.check(False)


def train(model: nn.Module, schedule: str, devices=TURN, n: int = 8, steps: int = 3) -> None:
    """Steps with an optimizer, clipping and gradients added up, then a forward-only call and an evaluation."""
    x, y = batch()
    with fxchimera.pipeline(
        model, example_args=(x,), loss_fn=nn.functional.mse_loss, num_stages=4, n_microbatches=n, schedule=schedule, devices=devices
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        for number in range(steps):
            pipe.step(x, target=y)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            if number % 2:
                optimizer.zero_grad()
        pipe(x)
        pipe.evaluate(x, target=y)


@pytest.mark.parametrize(
    ("schedule", "devices"),
    [
        pytest.param("chimera", TURN),
        pytest.param("zbv", DEVICES[0], marks=pytest.mark.matrix),
        pytest.param("chimera", DEVICES[0], marks=pytest.mark.matrix),
        pytest.param("1f1b", TURN, marks=pytest.mark.matrix),
        pytest.param("1f1b", DEVICES[0], marks=pytest.mark.matrix),
        pytest.param("zbv", TURN, marks=pytest.mark.matrix),
        pytest.param("dualpipe", TURN, marks=pytest.mark.matrix),
        pytest.param("dualpipe", DEVICES[0], marks=pytest.mark.matrix),
        pytest.param("auto", TURN, marks=pytest.mark.matrix),
    ],
)
def test_no_stream_runs_ahead_of_another(schedule, devices):
    train(Blocks(), schedule, devices)
    assert not torch.ops.twin.faults()


def test_no_stream_runs_ahead_with_tied_parameters():
    train(Tied(), "chimera")
    assert not torch.ops.twin.faults()


@pytest.mark.parametrize(
    ("schedule", "losses"),
    [("chimera", 2), pytest.param("1f1b", 1, marks=pytest.mark.matrix), pytest.param("zbv", 1, marks=pytest.mark.matrix)],
)
def test_a_step_reads_the_losses_and_nothing_else_back(schedule, losses):
    """Once for each device that computes losses: the last stages of the down pipe and of the up pipe."""
    x, y = batch()
    options = {"example_args": (x,), "loss_fn": nn.functional.mse_loss, "num_stages": 4, "n_microbatches": 8, "devices": TURN}
    with fxchimera.pipeline(Blocks(), schedule=schedule, **options) as pipe:
        pipe.step(x, target=y)
        torch.ops.twin.host_reads()
        pipe.step(x, target=y)
        assert torch.ops.twin.host_reads() == losses


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(("handover", "receive", "wait"), id="a message is read before it is written"),
        pytest.param(("handover", "pass_on", "wait"), id="a message is copied before it is computed"),
        pytest.param(("feed", "take", "wait"), id="inputs are read before they arrive"),
        pytest.param(("lanes", "entered", "wait"), id="a step begins before the optimizer ends", marks=pytest.mark.matrix),
        pytest.param(("lanes", "call", "wait"), id="the optimizer begins before the step ends"),
        pytest.param(("handover", "_copy", "keep"), id="what is sent is freed before it is copied"),
        pytest.param(("handover", "receive", "keep"), id="what is received is freed before it is read", marks=pytest.mark.matrix),
        pytest.param(("feed", "take", "keep"), id="inputs are freed before they are read", marks=pytest.mark.matrix),
    ],
)
def test_a_call_that_is_left_out_is_noticed(place, monkeypatch):
    faulty = Faulty(*place)
    monkeypatch.setattr("fxchimera.runtime.devices.devices.TorchAccelerator", lambda: faulty)
    expected = "without a wait" if place[2] == "wait" else "record_stream was not called"
    with contextlib.suppress(PipelineError, RuntimeError):  # at the first read that is too early
        train(Blocks(2), "chimera", steps=2)
    assert faulty.left_out
    assert any(expected in fault for fault in torch.ops.twin.faults())
