"""A fault in one rank's thread is the caller's error, and leaves the gradients of before and no threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from fxchimera import PipelineError
from tests.faults import IN_USER_CODE, Fault, faults, in_thread_of, plant
from tests.local.wrapped import step, wrap
from tests.parity import assert_same_tensors, gradients_of

RAISES = {"interrupted": KeyboardInterrupt, "exit": SystemExit}


def cells() -> list[Any]:
    """Every kind of user code, six places each, two and four ranks; one of twelve runs by default."""
    found = []
    for number, kind in enumerate(IN_USER_CODE):
        for stages in (2, 4):
            for place, fault in enumerate(faults(kind, stages)):
                default = place == number % 6 and stages == 2 + 2 * (number % 2)
                marks = () if default else pytest.mark.torture
                schedule = "chimera" if place % 2 else "zb-h1"
                found.append(pytest.param(fault, stages, schedule, marks=marks, id=f"{kind}-{stages}-{place}"))
    return found


@pytest.mark.parametrize(("fault", "stages", "schedule"), cells())
def test_the_caller_is_told_what_failed_and_where(fault: Fault, stages: int, schedule: str) -> None:
    threads = threading.active_count()
    example, arm = plant(fault, in_thread_of(fault.victim))
    with wrap(example, stages, 4, schedule) as pipe:
        step(pipe, example)
        before = gradients_of(example.model)
        arm()
        with pytest.raises(RAISES.get(fault.kind, PipelineError)) as caught:
            step(pipe, example)
        assert_same_tensors(gradients_of(example.model), before)
        wanted = (
            rf"rank {fault.victim} failed: stage \d \((down|up)\), micro-batch \d, action \d[FBIW]\d: {IN_USER_CODE[fault.kind]}"
        )
        if fault.kind not in RAISES:
            assert caught.match(wanted)
        with pytest.raises(PipelineError, match=wanted):
            step(pipe, example)
    assert threading.active_count() == threads
