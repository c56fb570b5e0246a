"""Where the tests of this folder compute: all GPUs there are, ranks sharing them if they are fewer.

With FXCHIMERA_TWIN they run on the accelerator made of host memory instead, which tries the tests themselves; what needs work that
goes on by itself is left out there.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.device.twin import DEVICES, load

__all__ = ["MIMIC", "NEEDED", "devices"]

MIMIC = bool(os.environ.get("FXCHIMERA_TWIN"))
if MIMIC and not torch.accelerator.is_available():
    load()
NEEDED = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not MIMIC and not torch.cuda.is_available(), reason="torch finds no CUDA device, or FXCHIMERA_GPU is not set (nox -s gpu)"
    ),
]


def devices(ranks: int) -> list[str]:
    """One device for each rank."""
    found = DEVICES if MIMIC else [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return [found[rank % len(found)] for rank in range(ranks)]
