"""What each of two processes does on a GPU of its own; started by torchrun.

The same steps give the same bits whether messages, and sums over pipelines, go over sockets or over torch's groups; and a rank that
raises in the middle of a step ends the other one soon, whose device may be waiting for it.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn

import fxchimera
from tests.device import carrier
from tests.device.models import Blocks, batch
from tests.gpu.where import MIMIC, devices

RANK = int(os.environ.get("RANK", "0"))
SECONDS = 20.0


def wrapped(model: nn.Module, stages: int, schedule: str, transport: str) -> fxchimera.Pipeline:
    where: Any = devices(2) if stages == 2 else devices(2)[RANK]
    return fxchimera.pipeline(
        model, example_args=batch()[:1], loss_fn=nn.functional.mse_loss, num_stages=stages, n_microbatches=4, schedule=schedule,
        seed=3, devices=where, transport=transport, wait_seconds=60.0,
    )  # fmt: skip


def outcomes(stages: int, schedule: str, transport: str) -> list[torch.Tensor]:
    """Losses and gradients of three steps of training."""
    x, y = batch()
    found = []
    with wrapped(Blocks(), stages, schedule, transport) as pipe:
        names = (pipe._world.backends.messages, pipe._world.backends.sums)
        assert names.count(None) == (2 if transport == "sockets" else 1 if stages == 2 else 0), names
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            found.append(pipe.step(x, target=y))
            found += [p.grad.cpu() for p in pipe.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        assert pipe.verify(x, target=y).ok
    return found


def fail() -> None:
    """Rank 1 raises in its second step."""
    x, y = batch()
    model = Blocks()
    calls: list[int] = []
    armed: list[bool] = []  # not while the model is recorded

    def hook(module: nn.Module, inputs: Any) -> None:
        calls.extend([0] * len(armed))
        if RANK == 1 and len(calls) > 8:
            raise ValueError("planted")

    for block in model.blocks:
        block.register_forward_pre_hook(hook)
    pipe = wrapped(model, 2, "chimera", "groups")
    armed.append(True)
    began, text = time.monotonic(), ""
    try:
        for _ in range(20):
            began = time.monotonic()
            pipe.step(x, target=y)
            torch.accelerator.synchronize()
    except fxchimera.PipelineError as error:
        text = str(error)
    assert "rank 1 failed" in text, text
    assert "planted" in text, text
    links = pipe._engine._transports[0]._links._links.values()
    while MIMIC and not all(link.group.aborted for link in links):  # by the thread that has heard of the failure
        assert time.monotonic() - began < SECONDS, "a device may wait for a rank that is gone"
        time.sleep(0.05)
    assert time.monotonic() - began < SECONDS
    pipe.close()
    assert time.monotonic() - began < 2 * SECONDS


def main() -> None:
    if MIMIC:
        carrier.register()
    torch.accelerator.set_device_index(RANK)
    for stages, schedule in ((2, "chimera"), (2, "1f1b"), (1, "gpipe")):
        here, there = (outcomes(stages, schedule, transport) for transport in ("sockets", "groups"))
        for one, other in zip(here, there, strict=True):
            assert torch.equal(one, other)
    fail()


if __name__ == "__main__":
    main()
