"""What each of two processes does, on a device of its own: steps like those of the same model on the CPU; started by torchrun."""

from __future__ import annotations

import copy

import torch
from torch import nn

import fxchimera
from tests.device.models import Blocks, batch
from tests.device.twin import DEVICES, load


def main() -> None:
    load()
    torch.ops.twin.check(True)
    x, y = batch()
    model = Blocks()
    other = copy.deepcopy(model)
    common = {"example_args": (x,), "loss_fn": nn.functional.mse_loss, "num_stages": 2, "n_microbatches": 4, "seed": 3}
    found = []
    for one, devices in ((model, DEVICES), (other, "cpu")):
        with fxchimera.pipeline(one, schedule="chimera", devices=devices, **common) as pipe:
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
            assert places == ({DEVICES[rank]} if devices == DEVICES else {"cpu"})
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)
    assert not torch.ops.twin.faults()


if __name__ == "__main__":
    main()
