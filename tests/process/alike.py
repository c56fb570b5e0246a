"""The same training by processes and by threads, compared bit for bit."""

from __future__ import annotations

from typing import Any

import torch

from fxchimera.schedule.order import Order
from tests import workers
from tests.parity import assert_same_tensors
from tests.process.pool import Pool

__all__ = ["assert_trained_as_by_threads", "union"]


def union(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The owned entries of all ranks; nobody owns what another does."""
    assert sum(map(len, parts)) == len({key for part in parts for key in part})
    return {key: value for part in parts for key, value in part.items()}


def assert_trained_as_by_threads(processes: Pool, name: str, stages: int, n: int, schedule: str | Order) -> None:
    """Three AdamW steps with clipping and dropout: losses, norms, gradients and the trained state."""
    expected = workers.train(name, stages, n, schedule)
    ranks = processes.run(stages, workers.train, name, stages, n, schedule)
    for answer in ranks:
        assert all(map(torch.equal, answer["losses"], expected["losses"]))
        assert all(map(torch.equal, answer["norms"], expected["norms"]))
        assert answer["threads"] == []
    assert_same_tensors(union([answer["gradients"] for answer in ranks]), expected["gradients"])
    assert_same_tensors(ranks[0]["state"], expected["state"])
    assert all(answer["state"] == {} for answer in ranks[1:])
