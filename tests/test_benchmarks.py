"""The benchmarks keep their format; the predictions for emulated devices are the closed forms."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.process
def test_emulated_prints_one_object_with_closed_form_predictions():
    """D = 2: 1F1B takes (N + 1)(F + B), Chimera has no bubble, and with two copies of halves nothing takes less than the work."""
    command = [sys.executable, str(ROOT / "benchmarks" / "emulated.py"), "--stages", "2", "--microbatches", "4", "--json"]
    quick = ["--forward-ms", "4", "--backward-ms", "8", "--repeats", "1"]
    done = subprocess.run([*command, *quick], capture_output=True, text=True, timeout=200, check=True)
    table = json.loads(done.stdout)
    assert set(table) == {"ours", "torch", "machine"}
    assert set(table["torch"]) == {"GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"}
    ideal = {name: row["ideal_ms"] for name, row in table["ours"].items()}
    assert set(ideal) == {"1f1b", "chimera", "auto-1", "auto-2"}
    assert (ideal["1f1b"], ideal["chimera"]) == pytest.approx((60.0, 48.0))
    assert 48.0 <= ideal["auto-2"] + 1e-9 <= ideal["auto-1"] + 2e-9 < 60.0
    assert table["torch"]["GPipe"]["ideal_ms"] == pytest.approx(60.0)
    assert all(row["measured_ms"] > 0.99 * row["ideal_ms"] for whose in ("ours", "torch") for row in table[whose].values())
    assert all(row["simulated_ms"] >= row["ideal_ms"] for row in table["ours"].values())
    assert table["ours"]["1f1b"]["actions"] == table["torch"]["1F1B"]["actions"] == 8  # four forwards, four backwards


@pytest.mark.process
def test_real_runs_the_same_model_through_both():
    """It raises unless all losses agree."""
    command = [sys.executable, str(ROOT / "benchmarks" / "real.py"), "--microbatches", "2", "--json", "--rounds", "1"]
    small = ["--width", "32", "--rows", "1", "--tokens", "8", "--ours", "1f1b,chimera", "--peers", "1F1B,ZBVZeroBubble"]
    done = subprocess.run([*command, *small], capture_output=True, text=True, timeout=200, check=True)
    table = json.loads(done.stdout)["2"]
    assert set(table["ours"]) == {"1f1b", "chimera"}
    assert set(table["torch"]) == {"1F1B", "ZBVZeroBubble"}
    assert table["torch"]["1F1B"]["over_1f1b"] == 1.0
    for row in (*table["ours"].values(), *table["torch"].values()):
        assert row["tokens_per_second"] == pytest.approx(1e3 * 16 / row["step_ms"])
