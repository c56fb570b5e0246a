"""Deferred batch norm over processes: the statistics are those of the rows of all replicas and of all pipelines."""

from __future__ import annotations

import pytest
import torch

from tests import normed
from tests.local.toys import data
from tests.process.pool import Pool

pytestmark = pytest.mark.process


@pytest.mark.parametrize(("schedule", "stages", "width"), [("chimera", 2, 1), ("1f1b", 2, 2)])
def test_statistics_are_of_all_rows(processes: Pool, schedule: str, stages: int, width: int) -> None:
    state = processes.run(stages * width, normed.train_deferred, schedule, stages, width)[0]
    x, _ = data(normed.ROWS * width)
    keep = 0.9**2
    torch.testing.assert_close(state["0.running_mean"], (1 - keep) * x.mean(0), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(state["0.running_var"], keep * torch.ones_like(x[0]) + (1 - keep) * x.var(0), rtol=1e-12, atol=1e-13)
    assert int(state["0.num_batches_tracked"]) == 2
