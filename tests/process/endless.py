"""A script for torchrun: trains for ever; every rank writes its process number into the folder that it is given."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

from tests.local.toys import chain, data, seeded
from tests.local.wrapped import wrap
from tests.models import Example


def main(folder: Path) -> None:
    x, target = data(8, 6)
    torch.set_num_threads(1)
    pipe = wrap(Example(seeded(lambda: chain(4)), (x,), {}, target, nn.functional.mse_loss), 2, 4, "1f1b")
    pipe.step(x, target=target)
    (folder / f"{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    while True:
        pipe.step(x, target=target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
