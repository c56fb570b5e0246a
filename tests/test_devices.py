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
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        ("", "not matrix"),
        pytest.param("test_placement.py", "matrix", marks=pytest.mark.matrix),
        pytest.param("test_streams.py", "matrix", marks=pytest.mark.matrix),
        pytest.param("test_zoo.py", "matrix", marks=pytest.mark.matrix),
    ],
)
def test_on_two_devices_made_of_host_memory(where, chosen):
    run("pytest", f"tests/device/{where}", "-q", "-x", "-m", chosen, "-p", "no:xdist", "-p", "no:cacheprovider")


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler to build the accelerator with")
@pytest.mark.process
@pytest.mark.matrix
@pytest.mark.parametrize(("pipelines", "transport"), [(1, "sockets"), (1, "auto"), (1, "groups"), (2, "sockets"), (2, "auto")])
def test_processes_on_a_device_each(pipelines, transport):
    run("torch.distributed.run", "--standalone", "--nproc-per-node", str(2 * pipelines), "-m", "tests.device.ranks", transport)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler to build the accelerator with")
@pytest.mark.process
@pytest.mark.matrix
def test_a_wait_that_is_left_out_between_processes_is_noticed():
    run("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.device.faulty")


def run(*arguments: str) -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "passes")])
    surroundings = os.environ | {"FXCHIMERA_TWIN": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
