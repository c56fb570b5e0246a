"""A script for torchrun, or for python alone: trains for ever; every process writes its number into the folder that it is given."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import fxchimera

if __name__ == "__main__":  # no function, whose frame would be one more in every traceback that is counted
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4)))
    x, target = torch.randn(8, 6), torch.randn(8, 6)
    pipe = fxchimera.pipeline(
        model, example_args=(x,), loss_fn=torch.nn.functional.mse_loss, num_stages=ranks, n_microbatches=4, schedule="1f1b"
    )
    pipe.step(x, target=target)
    pid = folder / f"{os.environ.get('RANK', '0')}.pid"
    pid.with_suffix(".new").write_text(str(os.getpid()))
    pid.with_suffix(".new").rename(pid)
    while True:
        pipe.step(x, target=target)
