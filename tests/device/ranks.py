"""What each of some processes does, on a device of its own: steps like those of the same model on the CPU; started by torchrun.

python -m tests.device.ranks auto|sockets|groups
"""

from __future__ import annotations

import copy
import os
import sys

import torch
from torch import nn

import fxchimera
from fxchimera.runtime.processes.backends import Backends
from tests.device import carrier
from tests.device.models import Blocks, batch
from tests.device.twin import DEVICES, load


def main(transport: str) -> None:
    load()
    carrier.register()
    torch.ops.twin.check(True)
    x, y = batch()
    model = Blocks()
    other = copy.deepcopy(model)
    common = {"example_args": (x,), "loss_fn": nn.functional.mse_loss, "num_stages": 2, "n_microbatches": 4, "seed": 3}
    own = DEVICES if int(os.environ["RANK"]) < 2 else DEVICES[::-1]  # counterparts of two pipelines have a device each, too
    torch.accelerator.set_device_index(torch.device(own[int(os.environ["RANK"]) % 2]).index)  # as scripts for torchrun do
    found = []
    for one, devices in ((model, own), (other, "cpu")):
        with fxchimera.pipeline(one, schedule="chimera", devices=devices, transport=transport, **common) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            numbers = []
            for _ in range(3):
                numbers += [float(pipe.step(x, target=y)), float(pipe.clip_grad_norm_(1.0))]
                optimizer.step()
                optimizer.zero_grad()
            numbers += [float(pipe(x).sum()), float(pipe.evaluate(x, target=y))]
            assert pipe.verify(x, target=y).ok
            found.append(numbers)
            places, rank = {str(parameter.device) for parameter in pipe.parameters()}, pipe._world.grid.rank
            assert places == ({own[rank]} if devices == own else {"cpu"})
            wanted = {"sockets": (None, None), "groups": ("twins", "gloo"), "auto": ("twins", None)}[transport][devices == "cpu"]
            assert pipe._world.backends == Backends(wanted, wanted if pipe._world.grid.width > 1 else None)
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)
    faults = torch.ops.twin.faults()
    assert not faults, faults
    assert (carrier.TwinWork.waits > 0) == (transport != "sockets")


if __name__ == "__main__":
    main(sys.argv[1])
