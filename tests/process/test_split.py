"""Split backwards in processes: bitwise what threads give, and what the plain reference gives."""

from __future__ import annotations

import pytest

from fxchimera.schedule.auto import auto
from fxchimera.schedule.limits import Limits
from fxchimera.schedule.order import Order
from fxchimera.schedule.profile import Costs
from tests.process.alike import assert_trained_as_by_threads
from tests.process.pool import Pool

pytestmark = pytest.mark.process


def found() -> Order:
    """What the search finds for uneven stages on 4 ranks with one copy: computations there overtake each other's messages."""
    one = (1.0, 1.1, 1.2, 1.0)
    costs = Costs(forward=one, input_grad=one, weight_grad=one, backward=tuple(1.9 * seconds for seconds in one))
    return auto(4, 4, costs, Limits(copies=1), seconds=0.05).order


@pytest.mark.parametrize(
    ("name", "stages", "n", "schedule"), [("gpt2", 2, 4, "zbv"), ("tied", 4, 8, "dualpipe"), ("mlp", 4, 4, found())]
)
def test_processes_are_bitwise_equal_to_threads(processes: Pool, name: str, stages: int, n: int, schedule: str | Order) -> None:
    """Three AdamW steps with clipping and dropout; the local run of a family is compared with the reference elsewhere."""
    assert_trained_as_by_threads(processes, name, stages, n, schedule)
