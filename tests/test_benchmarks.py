"""The benchmark of emulated devices keeps its format, and its predictions are the closed forms."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.process
def test_emulated_prints_one_object_with_closed_form_predictions():
    """D = 2: 1F1B takes (N + 1)(F + B), Chimera has no bubble, whatever the costs."""
    command = [sys.executable, str(ROOT / "benchmarks" / "emulated.py"), "--stages", "2", "--microbatches", "4", "--json"]
    quick = ["--forward-ms", "4", "--backward-ms", "8", "--repeats", "1"]
    done = subprocess.run([*command, *quick], capture_output=True, text=True, timeout=200, check=True)
    table = json.loads(done.stdout)
    assert set(table) == {"ours", "torch"}
    assert set(table["torch"]) == {"GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"}
    assert {name: row["simulated_ms"] for name, row in table["ours"].items()} == pytest.approx({"1f1b": 60.0, "chimera": 48.0})
    assert table["torch"]["GPipe"]["ideal_ms"] == pytest.approx(60.0)
    for predicted, rows in (("simulated_ms", table["ours"]), ("ideal_ms", table["torch"])):
        assert all(row["measured_ms"] > 0.99 * row[predicted] for row in rows.values())
