"""A fault in one rank's thread is the caller's error, and leaves the gradients of before and no threads."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest

from fxchimera import PipelineError
from fxchimera.runtime.devices import crew
from tests.faults import IN_USER_CODE, STUCK, STUCK_SECONDS, WAIT_SECONDS, Fault, faults, in_thread_of, plant, throw
from tests.local.wrapped import step, wrap
from tests.parity import assert_same_tensors, gradients_of

RAISES = {"interrupted": KeyboardInterrupt, "exit": SystemExit}
KINDS = (*IN_USER_CODE, *STUCK)


def cells() -> list[Any]:
    """Every kind that a thread can have, six places each, two and four ranks; one of twelve runs by default."""
    found = []
    for number, kind in enumerate(KINDS):
        for stages in (2, 4):
            for place, fault in enumerate(faults(kind, stages)):
                default = place == number % 6 and stages == 2 + 2 * (number % 2) and kind not in STUCK  # see below
                marks = () if default else pytest.mark.torture
                schedule = "chimera" if place % 2 else "zb-h1"
                found.append(pytest.param(fault, stages, schedule, marks=marks, id=f"{kind}-{stages}-{place}"))
    return found


def rest(threads: int, seconds: float) -> int:
    """How many threads there are more, when those that are stuck have had their time."""
    deadline = time.monotonic() + seconds
    while (more := threading.active_count() - threads) and time.monotonic() < deadline:
        time.sleep(0.05)
    return more


@pytest.mark.parametrize(("fault", "stages", "schedule"), cells())
def test_the_caller_is_told_what_failed_and_where(
    fault: Fault, stages: int, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "_LEAVE_SECONDS", 0.5)
    threads, stuck = threading.active_count(), fault.kind in STUCK
    example, arm = plant(fault, in_thread_of(fault.victim))
    with wrap(example, stages, 4, schedule, wait_seconds=WAIT_SECONDS if stuck else 60.0) as pipe:
        step(pipe, example)
        before = gradients_of(example.model)
        arm(extra=lambda: step(pipe, example))
        with pytest.raises(RAISES.get(fault.kind, PipelineError)) as caught:
            step(pipe, example)
        assert_same_tensors(gradients_of(example.model), before)
        if stuck:
            waited = rf"has waited {WAIT_SECONDS:g} s for it; it is at: stage \d \((down|up)\), micro-batch \d"
            wanted = f"rank {fault.victim} failed: .* {waited}"
        else:
            place = r"stage \d \((down|up)\), micro-batch \d, action \d[FBIW]\d"
            wanted = rf"rank {fault.victim} failed: {place}: {re.escape(IN_USER_CODE[fault.kind])}"
        if fault.kind not in RAISES:
            assert caught.match(wanted)
        with pytest.raises(PipelineError, match=wanted):
            step(pipe, example)
    assert rest(threads, STUCK_SECONDS + 5.0 if stuck else 0.0) == 0


def test_a_thread_that_never_returns_is_named_and_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "_LEAVE_SECONDS", 0.3)
    example, _ = plant(Fault("forward", 1, 1), in_thread_of(1))
    threads, stuck, release = threading.active_count(), [False], threading.Event()
    on_victim = in_thread_of(1)
    for layer in example.model.children():
        layer.register_forward_pre_hook(lambda *_: release.wait(60.0) if stuck[0] and on_victim() else None)
    with wrap(example, 2, 4, "1f1b", wait_seconds=WAIT_SECONDS) as pipe:
        step(pipe, example)
        stuck[0] = True
        place = r"stage 1 \(down\), micro-batch 0, action 1F0"
        wanted = rf"rank 1 failed: rank 0, .* has waited {WAIT_SECONDS:g} s for it; it is at: {place}"
        with pytest.raises(PipelineError, match=wanted) as caught:
            step(pipe, example)
        note = "The thread of rank 1 has not returned from stage 1 (down), micro-batch 0, action 1F0; it may still write gradients."
        assert note in caught.value.__notes__
        with pytest.raises(PipelineError, match=wanted):
            step(pipe, example)
        release.set()
    assert rest(threads, 5.0) == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_whose_thread_has_ended_is_named() -> None:
    """An exception that a tool throws into a thread may find it idle, where nobody catches it."""
    example, _ = plant(Fault("forward", 1, 1), in_thread_of(1))
    threads = threading.active_count()
    with wrap(example, 2, 4, wait_seconds=30.0) as pipe:
        step(pipe, example)
        (worker,) = (thread for thread in threading.enumerate() if thread.name == "fxchimera-rank-1")
        assert worker.ident is not None
        throw(worker.ident, SystemExit)
        for _ in range(2):  # the first wakes it up
            with pytest.raises(PipelineError, match="rank 1 failed: its thread has ended, by an exception from outside"):
                step(pipe, example)
    assert threading.active_count() == threads
