"""Recordings of processes that hold their own stages only: how many, in advance, and where values are missing."""

from __future__ import annotations

import pytest

from tests import warming
from tests.process.pool import Pool
from tests.process.test_found import assert_gradients

pytestmark = pytest.mark.process


def test_epochs_with_a_smaller_last_batch_record_each_shape_once(processes: Pool) -> None:
    """Two rows a micro-batch are recorded at wrap; one row, and both in evaluation, are three more."""
    answers = processes.run(2, warming.epochs)
    for without, advance, after, losses in answers:
        assert (without, advance, after) == (3, 3, 0)
        assert losses == answers[0][3]
        assert losses[:10] == losses[10:], "nothing but the time of the recordings differs"


def test_lengths_masks_flags_and_modes_are_recorded_once_each(processes: Pool) -> None:
    """Four signatures in two modes, of which the first in training was recorded at wrap."""
    answers = processes.run(2, warming.flags)
    for count, losses in answers:
        assert count == 7
        assert losses == answers[0][1]
        assert losses[:8] == losses[8:16] == losses[16:]
    assert warming.flags() == answers[0], "ranks as threads"


def test_ranks_that_warm_up_other_signatures_are_told(processes: Pool) -> None:
    for name, message, seconds in processes.run(2, warming.differ):
        assert name == "BatchError"
        assert "rank 0: signatures (2 x (float64[2, 6]))" in message
        assert "rank 1: signatures (1 x (float64[3, 6]) and 1 x (float64[2, 6]))" in message
        assert seconds < 5.0


def test_a_recording_that_needs_another_ranks_values_names_the_way_out(processes: Pool) -> None:
    """The second rank owns the parameter whose values decide shapes; the first has it as a meta tensor."""
    first, second = processes.run(2, warming.selecting, False)
    assert "pipe.warmup(<arguments>, lend_parameters=True)" in first[0]
    assert "pipe.warmup(<arguments>, lend_parameters=True)" in second[0]


def test_lent_parameters_make_that_recording(processes: Pool) -> None:
    answers = processes.run(2, warming.selecting, True)
    assert [message for message, _ in answers] == ["", ""]
    expected = {name: value for name, value in warming.selected_gradients().items() if value is not None}
    assert_gradients([gradients for _, gradients in answers], expected)
