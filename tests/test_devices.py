"""Runs the tests of ``tests/device`` in a process that has an accelerator of two devices, made of host memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.twin import compiler

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler to build the accelerator with")
@pytest.mark.parametrize("chosen", ["not matrix", pytest.param("matrix", marks=pytest.mark.matrix)])
def test_on_two_devices_made_of_host_memory(chosen):
    options = ["-q", "-x", "-m", chosen, "-p", "no:xdist", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "tests/device", *options]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {"FXCHIMERA_TWIN": "1"}, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
