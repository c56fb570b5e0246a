"""Runs two ranks that are processes with one call left out after the other, each of which the vector clocks must notice.

torchrun --nproc-per-node 2 -m tests.device.faulty
"""

from __future__ import annotations

import os

import torch
from torch import nn

import fxchimera
from fxchimera.runtime.devices import devices as runtime_devices
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
OF_SUMS = [  # the same for two pipelines of one rank
    ("groupcircle", "begin_sum", "wait", WITHOUT_WAIT),  # gradients are sent before they are computed
    ("groupcircle", "end_sum", "wait", WITHOUT_WAIT),  # a sum is read before it is made
    ("carrier", "wait", "work", WITHOUT_WAIT),  # parts are added before they have come
]


def train(stages: int) -> str:
    """Train on the devices; return the error, if there was one."""
    x, y = batch()
    devices = DEVICES if stages == 2 else DEVICES[int(os.environ["RANK"])]
    schedule = "chimera" if stages == 2 else "gpipe"
    options = {"num_stages": stages, "n_microbatches": 6, "schedule": schedule, "transport": "groups", "wait_seconds": 20.0}
    try:
        with fxchimera.pipeline(Blocks(2), example_args=(x,), loss_fn=nn.functional.mse_loss, devices=devices, **options) as pipe:
            for _ in range(2):
                pipe.step(x, target=y)
    except (fxchimera.FxChimeraError, RuntimeError) as error:
        return str(error)
    return ""


def main() -> None:
    load()
    carrier.register()
    torch.accelerator.set_device_index(int(os.environ["RANK"]))
    for stages in (1, 2):  # nothing is left out
        torch.ops.twin.check(True)
        error, faults = train(stages), torch.ops.twin.faults()
        assert not error, error
        assert not faults, faults
    for stages, (*place, expected) in [*((2, place) for place in PLACES), *((1, place) for place in OF_SUMS)]:
        torch.ops.twin.check(True)
        faulty = Faulty(*place)
        runtime_devices.TorchAccelerator = lambda found=faulty: found
        carrier.TwinWork.deaf = place[2] == "work"
        error = train(stages)
        found = [error, *torch.ops.twin.faults()]
        assert faulty.left_out or carrier.TwinWork.deaf or error, place  # the other rank may have come to the place first
        assert any(expected in text for text in found), (place, found)
        carrier.TwinWork.deaf = False


if __name__ == "__main__":
    main()
