"""What the ranks do in the tests of public bug reports."""

from __future__ import annotations

from typing import Any

import torch

from tests.local.toys import chain, data, wrapped

__all__ = ["STEPS", "train_crossing"]

STEPS = 100


def train_crossing(steps: int) -> dict[str, Any]:
    """Train four layers, two stages a rank; returns rank 0's state."""
    (x, y), model = data(4), chain(4)
    with wrapped(model, x, num_stages=2, n_microbatches=4, schedule="interleaved-1f1b") as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), 0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            pipe.step(x, target=y)
            optimizer.step()
        return pipe.state_dict()
