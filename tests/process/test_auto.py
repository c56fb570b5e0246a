"""``schedule="auto"`` in processes: every rank finds the same cut and order, and trains what threads train."""

from __future__ import annotations

import pytest

from tests.process.alike import assert_trained_as_by_threads
from tests.process.pool import Pool

pytestmark = pytest.mark.process


@pytest.mark.parametrize(("name", "stages", "n"), [("gpt2", 3, 5), ("tied", 4, 8)])
def test_processes_are_bitwise_equal_to_threads(processes: Pool, name: str, stages: int, n: int) -> None:
    """Three AdamW steps with clipping and dropout."""
    assert_trained_as_by_threads(processes, name, stages, n, "auto")
