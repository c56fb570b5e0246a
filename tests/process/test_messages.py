"""Whatever proven order the ranks follow, every message arrives, and is the one that its receiver expects."""

from __future__ import annotations

import pytest

from tests.process import messages
from tests.process.pool import Pool


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    [
        (2, range(5)), (4, range(5, 10)),
        pytest.param(2, range(100, 400), marks=pytest.mark.torture), pytest.param(4, range(400, 1100), marks=pytest.mark.torture),
    ],
    ids=str,
)  # fmt: skip
def test_random_orders_bring_every_message_to_its_reader(processes: Pool, ranks: int, seeds: range) -> None:
    answers = processes.run(ranks, messages.walk, ranks, seeds, limit=30.0 + len(seeds))
    assert [wrong for _, wrong in answers] == [0] * ranks
    assert all(received > 0 for received, _ in answers)
