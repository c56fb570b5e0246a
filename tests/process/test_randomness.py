"""What is drawn at random in processes is what threads draw, and the plain model."""

from __future__ import annotations

import pytest
import torch

from tests.local.wrapped import reference
from tests.parity import assert_bitwise, assert_same_tensors
from tests.process.alike import union
from tests.process.pool import Pool
from tests.random_models import chain_of, steps

pytestmark = pytest.mark.process


@pytest.mark.parametrize(("kind", "stages", "schedule"), [("all together", 2, "zbv"), ("checkpoint", 4, "chimera")])
def test_processes_draw_what_threads_and_the_plain_model_draw(processes: Pool, kind: str, stages: int, schedule: str) -> None:
    """Two steps; attention's and layers' dropout, Python's and numpy's numbers, and what is drawn again in a backward."""
    threads = steps(kind, stages, 4, schedule)
    ranks = processes.run(stages, steps, kind, stages, 4, schedule)
    for number, expected in enumerate(threads):
        for rank in ranks:
            assert torch.equal(rank[number].loss, expected.loss)
        assert_same_tensors(union([rank[number].gradients for rank in ranks]), expected.gradients)
    assert_bitwise(threads[0], reference(chain_of(kind, 8), stages, 4, schedule))
