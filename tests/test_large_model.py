"""A model of 70 billion parameters is planned on this machine, in bounded time and memory."""

from __future__ import annotations

import pytest

from benchmarks.large_model import measure


def parameters() -> int:
    """Llama 3 70B, counted by hand: two tables of words, 80 layers, and the last norm."""
    hidden, inner, keys = 8192, 28672, 8 * 128
    attention = 2 * hidden * hidden + 2 * hidden * keys
    layer = attention + 3 * hidden * inner + 2 * hidden
    return 2 * 128256 * hidden + 80 * layer + hidden


@pytest.mark.matrix
@pytest.mark.parametrize("stages", [8, 16, 32, 64])
def test_a_large_llama_is_planned(stages):
    """Processor time, because test machines are shared; in two bytes a parameter, whatever the number of stages of a rank."""
    found = measure(stages, 2 * stages)
    plan = found["plan"]
    assert plan["num_ranks"] == stages
    assert sum(stage["parameter_bytes"] for stage in plan["stages"]) == 2 * parameters()
    assert found["peak_bytes"] <= 2 * 2**30
    assert found["processor_seconds"] <= 60
