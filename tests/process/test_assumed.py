"""Assumed answers over real gloo processes: every rank sees the same wrong answers, and repeats the same runs.

The witness is the local run of the same function, which tests/local compares with the plain model.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.branching import process_steps
from tests.parity import assert_same_tensors
from tests.process.pool import Pool

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*depends on parameters")]


@pytest.mark.parametrize(
    ("kind", "stages", "n", "skew"), [("branches", 4, 2, True), ("ponder", 2, 4, False), ("factors", 4, 1, False)]
)
def test_processes_are_bitwise_equal_to_threads(processes: Pool, kind: str, stages: int, n: int, skew: bool) -> None:
    """With ``skew`` no rank but the owner has the weights that decide, not even at wrap."""
    answers = processes.run(stages, partial(process_steps, kind, stages, n, skew=skew))
    losses, _, final = process_steps(kind, stages, n, state=answers[0][1])
    for found, _, _ in answers:
        assert all(map(torch.equal, found, losses))
    assert_same_tensors(answers[0][2], final)
