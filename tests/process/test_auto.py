"""``schedule="auto"`` in processes: every rank finds the same cut and order, and trains what threads train."""

from __future__ import annotations

import pytest

from fxchimera.schedule import Costs
from fxchimera.schedule.auto import auto
from fxchimera.schedule.limits import Limits
from tests.process.alike import assert_trained_as_by_threads
from tests.process.pool import Pool

pytestmark = pytest.mark.process


@pytest.mark.parametrize(("name", "stages", "n"), [("gpt2", 3, 5), ("tied", 4, 8)])
def test_processes_are_bitwise_equal_to_threads(processes: Pool, name: str, stages: int, n: int) -> None:
    """Three AdamW steps with clipping and dropout."""
    assert_trained_as_by_threads(processes, name, stages, n, "auto")


def test_two_stages_a_rank_in_both_directions(processes: Pool) -> None:
    """The order that a search finds for that shape alone."""
    order = auto(2, 4, Costs.uniform(2).with_split_price(0.04), Limits(peak=2.0, shapes=("bidirectional-v",)), seconds=0.1).order
    assert (order.placement.chunks, order.placement.weight_copies) == (2, 2)
    assert_trained_as_by_threads(processes, "gpt2", 2, 4, order)
