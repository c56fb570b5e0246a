"""What the ranks do in the test of deferred batch norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.local.toys import data, seeded, wrapped
from tests.workers import rank

__all__ = ["ROWS", "train_deferred"]

ROWS = 7  # of a pipeline


def train_deferred(schedule: str, stages: int, width: int) -> dict[str, Any]:
    """Two steps, each pipeline on its shard of one batch; returns the state on rank 0."""
    model = seeded(lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
    x, y = (tensor.split(ROWS)[rank() // stages] for tensor in data(ROWS * width))
    with wrapped(model, x, num_stages=stages, n_microbatches=3, schedule=schedule, batch_norm="deferred") as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
        for _ in range(2):
            pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
        return pipe.state_dict()
