"""Two processes on two GPUs, over the backend that torch has for them; where there is one GPU, or none, this is skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.where import NEEDED

ROOT = Path(__file__).parents[2]
pytestmark = [
    *NEEDED,
    pytest.mark.process,
    pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="a GPU for each of two processes is needed"),
]


def test_messages_and_sums_from_device_to_device():
    """As on the accelerator made of host memory, where the backend is one of the tests' own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.gpu.pair"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "passes")])
    surroundings = os.environ | {"PYTHONPATH": paths, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    done = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
