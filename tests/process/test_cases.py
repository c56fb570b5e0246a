"""Public bug reports that need processes."""

from __future__ import annotations

import pytest
import torch

from tests import cases
from tests.local.toys import chain, data
from tests.process.pool import Pool

pytestmark = pytest.mark.process


def test_p01_a_hundred_steps_with_two_stages_a_rank(processes: Pool) -> None:
    """Both directions cross one pair of ranks in every step; the training is the plain model's."""
    states = processes.run(2, cases.train_crossing, cases.STEPS)
    twin, (x, y) = chain(4), data(4)
    optimizer = torch.optim.SGD(twin.parameters(), 0.01)
    for _ in range(cases.STEPS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(twin(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(states[0], dict(twin.state_dict()), rtol=1e-9, atol=1e-11)
