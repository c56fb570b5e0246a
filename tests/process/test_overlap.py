"""Processes that are late, slow or at it for long: no bit changes, no sender waits, no memory grows."""

from __future__ import annotations

from typing import Any

import pytest

from fxchimera.schedule.families import schedules
from tests import overlaps, workers
from tests.parity import assert_same_tensors
from tests.process.alike import union
from tests.process.pool import Pool

pytestmark = pytest.mark.process

MEGABYTE = 2**20


def some(chosen: str) -> list[Any]:
    return [pytest.param(name, marks=() if name == chosen else pytest.mark.matrix) for name in sorted(schedules())]


@pytest.mark.parametrize("schedule", some("chimera"))
def test_random_sleeps_change_no_bit(processes: Pool, schedule: str) -> None:
    """Three AdamW steps with dropout and clipping, against threads that do not sleep."""
    expected = workers.train("gpt2", 4, 8, schedule)
    ranks = processes.run(4, overlaps.train_late, "gpt2", 4, 8, schedule)
    for answer in ranks:
        assert_same_tensors(dict(enumerate(answer["losses"])), dict(enumerate(expected["losses"])))
    assert_same_tensors(union([answer["gradients"] for answer in ranks]), expected["gradients"])
    assert_same_tensors(ranks[0]["state"], expected["state"])


def test_a_sender_does_not_wait_for_a_slow_receiver(processes: Pool) -> None:
    """Messages of 4 MiB: rank 0 has done all its forwards before rank 1 wakes up in its first."""
    answers = processes.run(2, overlaps.send_to_a_slow_receiver)
    sender, receiver = ({action: (start, end) for action, start, end in events} for events in answers)
    assert receiver["1F0"][1] - receiver["1F0"][0] > 1.0
    assert sender["0F3"][1] < receiver["1F0"][1]
    assert sender["0B0"][0] > receiver["1B0"][1]


@pytest.mark.parametrize("steps", [100, pytest.param(500, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("schedule", some("chimera"))
def test_memory_and_buffers_do_not_grow(processes: Pool, schedule: str, steps: int) -> None:
    """Resident memory to 5 MB; receive buffers within what the proof of the order allows, and all given back."""
    answers = processes.run(4, overlaps.run_long, schedule, 4, 8, steps, limit=240.0)
    for grown, pools in answers:
        assert grown < 5 * MEGABYTE
        assert pools
        for channel, (made, lent, most) in pools.items():
            assert made <= most, channel
            assert lent == 0, channel
