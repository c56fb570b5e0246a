"""Runs two ranks that are processes with one call left out after the other, each of which the vector clocks must notice.

torchrun --nproc-per-node 2 -m tests.device.faulty
"""

from __future__ import annotations

import torch
from torch import nn

import fxchimera
from fxchimera.runtime import devices as runtime_devices
from tests.device import carrier
from tests.device.leftout import Faulty
from tests.device.models import Blocks, batch
from tests.device.twin import DEVICES, load

WITHOUT_WAIT, FREED = "without a wait", "record_stream was not called"
PLACES = [  # file, function, method, what is noticed
    ("grouptransport", "send", "wait", WITHOUT_WAIT),  # a message is copied before it is computed
    ("grouptransport", "take", "wait", WITHOUT_WAIT),  # a message is read before it has come
    ("grouptransport", "send", "keep", FREED),  # what is sent is freed before it is copied
    ("grouptransport", "take", "keep", FREED),  # what has come is freed before it is read
    ("carrier", "wait", "work", WITHOUT_WAIT),  # an event is taken before the group has written
]


def train() -> str:
    """Train on the devices; return the error, if there was one."""
    x, y = batch()
    options = {"example_args": (x,), "loss_fn": nn.functional.mse_loss, "num_stages": 2, "n_microbatches": 6, "devices": DEVICES}
    try:
        with fxchimera.pipeline(Blocks(2), schedule="chimera", transport="groups", wait_seconds=20.0, **options) as pipe:
            for _ in range(2):
                pipe.step(x, target=y)
    except (fxchimera.FxChimeraError, RuntimeError) as error:
        return str(error)
    return ""


def main() -> None:
    load()
    carrier.register()
    usual = runtime_devices.TorchAccelerator
    for *place, expected in PLACES:
        torch.ops.twin.check(True)
        faulty = Faulty(*place)
        runtime_devices.TorchAccelerator = lambda found=faulty: found
        carrier.TwinWork.deaf = place[2] == "work"
        error = train()
        found = [error, *torch.ops.twin.faults()]
        assert faulty.left_out or carrier.TwinWork.deaf, (place, error)
        assert any(expected in text for text in found), (place, found)
        carrier.TwinWork.deaf = False
    runtime_devices.TorchAccelerator = usual
    torch.ops.twin.check(True)
    assert train() == ""
    assert torch.ops.twin.faults() == []


if __name__ == "__main__":
    main()
