"""Recomputation in processes: bitwise what threads give without it."""

from __future__ import annotations

import functools

import pytest

from tests import workers
from tests.parity import assert_same_tensors
from tests.process.alike import union
from tests.process.pool import Pool

pytestmark = pytest.mark.process


@pytest.mark.parametrize("recompute", ["full", ("selective", "none", "full", "selective")])
def test_processes_train_as_threads_without_recomputation(processes: Pool, recompute: str | tuple[str, ...]) -> None:
    """Three AdamW steps with clipping and dropout, split backwards and one copy of the weights."""
    expected = workers.train("gpt2", 2, 4, "zbv", recompute="none")
    ranks = processes.run(2, functools.partial(workers.train, recompute=recompute), "gpt2", 2, 4, "zbv")
    assert_same_tensors(union([answer["gradients"] for answer in ranks]), expected["gradients"])
    assert_same_tensors(ranks[0]["state"], expected["state"])
