"""``schedule="auto"`` in processes: every rank finds the same cut and order, and trains what threads train."""

from __future__ import annotations

import pytest
import torch

from tests import workers
from tests.parity import assert_same_tensors
from tests.process.pool import Pool

pytestmark = pytest.mark.process


@pytest.mark.parametrize(("name", "stages", "n"), [("gpt2", 3, 5), ("tied", 4, 8)])
def test_processes_are_bitwise_equal_to_threads(processes: Pool, name: str, stages: int, n: int) -> None:
    """Three AdamW steps with clipping and dropout."""
    expected = workers.train(name, stages, n, "auto")
    ranks = processes.run(stages, workers.train, name, stages, n, "auto")
    for answer in ranks:
        assert all(map(torch.equal, answer["losses"], expected["losses"]))
        assert all(map(torch.equal, answer["norms"], expected["norms"]))
    gradients = {key: value for answer in ranks for key, value in answer["gradients"].items()}
    assert_same_tensors(gradients, expected["gradients"])
    assert_same_tensors(ranks[0]["state"], expected["state"])
