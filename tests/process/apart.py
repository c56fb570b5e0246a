"""A script for torchrun: trains until something happens, and every rank writes down how that ended and how long its last step took.

python -m torch.distributed.run ... -m tests.process.apart FOLDER NUM_STAGES WAIT_SECONDS SILENT_SECONDS
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from fxchimera import PipelineError
from fxchimera.runtime.failures import pulse
from tests.local.toys import WIDTH, chain, data, seeded
from tests.local.wrapped import wrap
from tests.models import Example


def main(folder: Path, num_stages: int, wait_seconds: float, silent_seconds: float) -> None:
    pulse._SILENT_SECONDS = silent_seconds
    torch.set_num_threads(1)
    x, target = data(8, WIDTH)
    rank = os.environ["RANK"]
    example = Example(seeded(lambda: chain(4)), (x,), {}, target, nn.functional.mse_loss)
    pipe = wrap(example, num_stages, 4, "chimera", wait_seconds=wait_seconds)
    pipe.step(x, target=target)
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    try:
        while True:
            began = time.monotonic()
            pipe.step(x, target=target)
    except PipelineError as error:
        ending = {"rank": int(rank), "error": str(error), "seconds": time.monotonic() - began}
    began = time.monotonic()
    pipe.close()
    (folder / f"{rank}.json").write_text(json.dumps({**ending, "closing": time.monotonic() - began}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:5]))
