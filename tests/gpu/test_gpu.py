"""On GPUs: the plain model's gradients, whatever streams are late, few waits of the host, and messages under computation."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxchimera
from fxchimera.runtime.weights.moving import move_model
from tests.device.models import Blocks, Tied, batch
from tests.gpu.burning import Late
from tests.gpu.where import MIMIC, NEEDED, devices
from tests.parity import gradients_of

pytestmark = NEEDED
SCHEDULES = ["chimera", "1f1b", "zbv", "dualpipe", "auto"]


def wrapped(model: nn.Module, schedule: str, ranks: int = 4, n: int = 8, **options) -> fxchimera.Pipeline:
    return fxchimera.pipeline(
        model, example_args=batch()[:1], loss_fn=nn.functional.mse_loss, num_stages=ranks, n_microbatches=n, schedule=schedule,
        seed=3, devices=devices(ranks), **options,
    )  # fmt: skip


def outcomes(model: nn.Module, schedule: str, steps: int = 3) -> list[Tensor]:
    """Losses and gradients of some steps of training, on the CPU."""
    x, y = batch()
    found = []
    with wrapped(model, schedule) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        for _ in range(steps):
            found.append(pipe.step(x, target=y))
            found += [gradient.cpu() for gradient in gradients_of(model).values() if gradient is not None]
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append(pipe(x))
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", [Blocks, Tied])
def test_the_plain_models_loss_and_gradients(kind, schedule):
    x, y = (tensor.to(devices(1)[0]) for tensor in batch())
    model = kind().eval()  # no dropout, and statistics that stay
    plain = copy.deepcopy(model)
    move_model(plain, torch.device(devices(1)[0]))
    for module in plain.modules():  # as a pipeline does with constants
        if isinstance(getattr(module, "offset", None), Tensor):
            module.offset = module.offset.to(devices(1)[0])
    expected = nn.functional.mse_loss(plain(x), y)
    expected.backward()
    with wrapped(model, schedule) as pipe:
        found = pipe.step(x.cpu(), target=y.cpu())
        torch.testing.assert_close(found, expected.detach().cpu(), rtol=1e-12, atol=0)
        wanted = gradients_of(plain)
        for name, gradient in gradients_of(model).items():
            assert gradient is not None, name
            assert wanted[name] is not None, name
            torch.testing.assert_close(gradient.cpu(), wanted[name].cpu(), rtol=1e-9, atol=1e-14, msg=name)
        assert pipe.verify(x.cpu(), target=y.cpu()).ok


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_runs_with_dropout_are_bitwise_equal(schedule):
    for one, other in zip(outcomes(Blocks(), schedule), outcomes(Blocks(), schedule), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("schedule", ["chimera", "zbv"])
def test_late_streams_change_nothing(schedule, seed, monkeypatch):
    expected = outcomes(Blocks(), schedule, steps=2)
    late = Late(0.2, 8 if MIMIC else 4096, seed)
    monkeypatch.setattr("fxchimera.runtime.devices.devices.TorchAccelerator", lambda: late)
    for one, other in zip(outcomes(Blocks(), schedule, steps=2), expected, strict=True):
        assert torch.equal(one, other)
    assert late.made > 10


@pytest.mark.skipif(MIMIC, reason="its streams do not run by themselves")
def test_without_waits_late_streams_do_change_something(monkeypatch):
    expected = outcomes(Blocks(), "chimera", steps=2)
    late = Late(0.5, 4096)
    late.deaf = True
    monkeypatch.setattr("fxchimera.runtime.devices.devices.TorchAccelerator", lambda: late)
    try:
        found = outcomes(Blocks(), "chimera", steps=2)
    except fxchimera.FxChimeraError:  # a loss of what happened to be in memory may be nan
        return
    assert not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.skipif(MIMIC, reason="only CUDA tells when the host waits")
def test_the_host_waits_for_the_losses_alone():
    x, y = batch()
    with wrapped(Blocks(), "chimera") as pipe:
        pipe.step(x, target=y)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                pipe.step(x, target=y)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [str(one.message) for one in caught if "synchroniz" in str(one.message)]
    assert len(waits) <= torch.cuda.device_count(), waits


def test_messages_go_under_computation(tmp_path):
    """Writes the step as a picture and for Perfetto, to FXCHIMERA_ARTIFACTS if that is set."""
    folder, width = Path(os.environ.get("FXCHIMERA_ARTIFACTS", tmp_path)), 16 if MIMIC else 2048
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)))
    x = torch.randn(64 if MIMIC else 4096, width)
    with fxchimera.pipeline(
        model, example_args=(x,), loss_fn=lambda out: out.square().mean(), num_stages=4, n_microbatches=8, schedule="chimera",
        devices=devices(4),
    ) as pipe:  # fmt: skip
        for _ in range(3):
            pipe.step(x)
        pipe.trace(folder / "step.json")
        (folder / "step.svg").write_text(pipe.draw().to_svg())
        events = pipe._timeline.events
    computing = [event for event in events if event.action.kind.is_compute]
    sent = [event for event in events if event.action.kind.value.startswith("SEND") and event.action.microbatch is not None]
    hidden = [one for one in sent if any(other.start < one.end and one.start < other.end for other in computing)]
    (folder / "messages.txt").write_text(f"{len(hidden)} of {len(sent)} messages were on their way while a rank computed")
    assert sent
    assert MIMIC or len(hidden) > len(sent) // 2
