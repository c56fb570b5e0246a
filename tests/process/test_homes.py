"""Buffers over real processes: each rank has copies of its own, so a written one is valid on one rank, in every mode and path."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.moving import evaluate_in_processes, train_two_norms
from tests.parity import assert_same_tensors
from tests.process.pool import Pool

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*depends on parameters")]


def test_an_evaluation_that_would_read_a_buffer_another_rank_writes_is_refused(processes: Pool) -> None:
    answers = processes.run(2, partial(evaluate_in_processes, 2))
    for error, _, _ in answers:
        assert "buffer 'mean' is written in forward and used in stages of the ranks [0, 1]" in error


@pytest.mark.parametrize(("stages", "n"), [(4, 4), (2, 2)])
def test_statistics_of_layers_that_only_some_paths_use_are_as_with_threads(processes: Pool, stages: int, n: int) -> None:
    """tests/local compares the threads with the plain model."""
    answers = processes.run(stages, partial(train_two_norms, stages, n))
    losses, state = train_two_norms(stages, n)
    for found, _ in answers:
        assert all(map(torch.equal, found, losses))
    assert_same_tensors(answers[0][1], state)
