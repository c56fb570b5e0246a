"""Long waits are told about, once each: which rank does not wait itself, and where it is."""

from __future__ import annotations

import logging
import re
import time

import pytest
import torch

from fxchimera import PipelineError
from fxchimera.runtime.failures.failure import Failure, Limits
from fxchimera.runtime.failures.patience import Awaited, Patience
from fxchimera.runtime.failures.place import label
from fxchimera.runtime.grid import Grid
from tests.faults import Fault, in_thread_of, plant
from tests.local.wrapped import step, wrap


def ranks(size: int = 4) -> Failure:
    failure = Failure(Limits(60.0), Grid.of_threads(size))
    failure.taken = True
    return failure


def waited(failure: Failure, awaited: Awaited | None, what: str = "rank 0, action 0B1") -> Patience:
    """A wait that is over its time to be told about, and has looked around three times."""
    patience = Patience(failure, what, 60.0, 0.01, awaited)
    time.sleep(0.02)
    for _ in range(3):
        patience()
    return patience


def test_notes_are_followed_to_the_rank_that_does_not_wait(caplog: pytest.LogCaptureFixture) -> None:
    failure = ranks()
    failure.mark(3, label("stage 3 (down), micro-batch 0, action 3F0"))
    for rank, other in ((2, 3), (1, 2)):
        failure.mark(rank, label(f"stage {rank} (down), micro-batch 0, action {rank}B0"))
        waited(failure, failure.message(other, rank), f"rank {rank}")
    caplog.clear()
    waited(failure, failure.message(1, 0))
    assert caplog.messages == [
        "rank 0, action 0B1 has waited 0 s for rank 1, which waits for rank 3, which is at: stage 3 (down), micro-batch 0, "
        "action 3F0; it waits on, for up to 60 s (pipeline(..., slow_seconds=, wait_seconds=))"
    ]
    assert caplog.records[0].name == "fxchimera"
    assert caplog.records[0].levelno == logging.WARNING


def test_of_an_exchange_those_who_are_not_there_are_named(caplog: pytest.LogCaptureFixture) -> None:
    failure = ranks()
    waited(failure, Awaited(1, (0, 2, 3), meeting=True), "rank 1, in an exchange")
    failure.mark(3, label("stage 3"))
    caplog.clear()
    waited(failure, Awaited(0, (1, 2, 3), meeting=True), "rank 0, in an exchange")
    (told,) = caplog.messages
    assert "for rank 2, which is at: outside of a step and rank 3, which is at: stage 3; it waits on" in told


def test_a_wait_leaves_no_note_and_says_nothing_before_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    failure = ranks()
    failure.taken = False
    failure.mark(0, label("stage 0"))
    with waited(failure, failure.message(1, 0)):
        assert failure.words(0) == "stage 0; waits for rank 1"
    assert failure.words(0) == "stage 0"
    assert not caplog.messages


def test_after_the_limit_the_slow_rank_is_to_blame() -> None:
    failure = ranks()
    failure.mark(2, label("stage 2 (up), micro-batch 3, action 2B3"))
    patience = Patience(failure, "rank 0, action 0B1", 0.01, 10.0, failure.message(2, 0))
    time.sleep(0.02)
    wanted = re.escape(
        "rank 2 failed: rank 0, action 0B1 has waited 0.01 s for it; it is at: stage 2 (up), micro-batch 3, action 2B3. A longer "
        "limit is set by pipeline(..., wait_seconds=)"
    )
    with pytest.raises(PipelineError, match=wanted):
        patience()
    with pytest.raises(PipelineError, match=wanted):
        failure.check()


@pytest.mark.parametrize("schedule", ["chimera", "1f1b"])
def test_a_slow_thread_is_named_and_changes_no_bit(schedule: str, caplog: pytest.LogCaptureFixture) -> None:
    slow = Fault("nap", 2, 2)
    example, arm = plant(slow, in_thread_of(slow.victim), 0.6)
    with wrap(example, 4, 4, schedule, slow_seconds=0.3) as pipe:
        arm()
        first = step(pipe, example)
        assert not caplog.messages, "a first step may compile"
        arm()
        again = step(pipe, example)
        told = list(caplog.messages)
        step(pipe, example)
    assert caplog.messages == told, "nobody is slow"
    assert told
    for message in told:
        assert re.match(
            r"rank [013], stage \d.* has waited 0 s for (rank [013], which waits for )?rank 2, which is at: "
            r"stage \d \((down|up)\), micro-batch \d, action \dF\d; it waits on",
            message,
        ), message
    assert torch.equal(first.loss, again.loss)
