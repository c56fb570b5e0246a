"""The benchmark of split backwards keeps its format, and its gradients have the bits of the whole backward."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_split_prints_one_object() -> None:
    """Sizes too small for the times to mean anything."""
    command = [sys.executable, str(ROOT / "benchmarks" / "split.py"), "--rounds", "2", "--json"]
    small = ["--batch", "2", "--length", "4", "--width", "16", "--channels", "4"]
    places = os.pathsep.join((str(ROOT), str(ROOT / "passes")))
    environment = {**os.environ, "PYTHONPATH": places}
    done = subprocess.run([*command, *small], capture_output=True, text=True, timeout=200, check=True, env=environment)
    table = json.loads(done.stdout)
    assert set(table) == {"gpt", "encoder", "conv"}
    for row in table.values():
        assert row["bitwise"] == 1.0
        assert row["(I+W)/B"] == pytest.approx(row["I/B"] + row["W/B"], rel=0.5)
        assert row["kept_until_W_MiB"] > 0
    elements = 2 * 4 * 16
    waiting = (1 + 1 + 1 + 4) + (3 + 1 + 4 + 1)  # inputs of qkv, out, up, down; gradients of their outputs
    assert table["gpt"]["kept_until_W_MiB"] * 2**20 == waiting * elements * 4
