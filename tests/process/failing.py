"""What runs in the processes of the tests of failures: a step with a planted fault."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from fxchimera.runtime.failures import pulse
from tests import workers
from tests.faults import STUCK, WAIT_SECONDS, Fault, plant
from tests.local.wrapped import step, wrap
from tests.parity import assert_same_tensors, gradients_of

__all__ = ["Ending", "meet", "straggle", "told"]

# the error's class and text ("" without one), and after how many seconds it came; the class and the seconds of another step's; the
# seconds of close()
Ending = tuple[str, str, float, str, float, float]


def _outcome(call: Callable[[], object]) -> tuple[str, str, float]:
    began = time.monotonic()
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def meet(fault: Fault, stages: int, schedule: str) -> Ending:
    """Train; the fault falls into the second step, and everybody tells how that ended; gradients must be as before it."""
    example, arm = plant(fault, lambda: workers.rank() == fault.victim)
    pipe = wrap(example, stages, 4, schedule, wait_seconds=WAIT_SECONDS if fault.kind in STUCK else 50.0)
    step(pipe, example)
    before = gradients_of(example.model)
    arm(extra=lambda: step(pipe, example))
    error, text, seconds = _outcome(lambda: step(pipe, example))
    if error:
        assert_same_tensors(gradients_of(example.model), before)
    again, _, at_once = _outcome(lambda: step(pipe, example))
    began = time.monotonic()
    pipe.close()
    return error, text, seconds, again, at_once, time.monotonic() - began


def straggle(stages: int, schedule: str, count: int, seconds: float, scale: float) -> list[float]:
    """Train on one batch, ``count`` steps, in each of which one rank sleeps somewhere; return the losses.

    The limits by which a rank counts as stopped or silent are ``scale`` times the usual ones.
    """
    for name in ("_PERIOD_SECONDS", "_STOPPED_SECONDS", "_SILENT_SECONDS", "_AWAY_SECONDS"):
        setattr(pulse, name, scale * getattr(pulse, name))
    naps = [0]
    example, arm = plant(Fault("nap", 0, 1), lambda: workers.rank() == naps[0], seconds)
    chance = random.Random(0)
    with wrap(example, stages, 4, schedule) as pipe:
        losses = [float(step(pipe, example).loss)]
        for _ in range(count):
            naps[0] = chance.randrange(stages)
            arm(chance.randint(1, 4))
            losses.append(float(step(pipe, example).loss))
    return losses


class _Heard(logging.Handler):
    """Keeps what the logger of the library says."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(f"{record.levelname}: {record.getMessage()}")

    def take(self) -> list[str]:
        taken, self.messages = self.messages, []
        return taken


def told(stages: int, schedule: str, slow: int, seconds: float) -> tuple[list[list[str]], list[float]]:
    """Train; rank ``slow`` takes its time in the first step, in the second, before the third, and not in the fourth.

    Returns what the library logs in each, when it does so after a third of these ``seconds``, and the losses.
    """
    example, arm = plant(Fault("nap", slow, 2), lambda: workers.rank() == slow, seconds)
    heard = _Heard()
    logging.getLogger("fxchimera").addHandler(heard)
    said, losses = [], []
    try:
        with wrap(example, stages, 4, schedule, slow_seconds=seconds / 3) as pipe:
            for when in ("in it", "in it", "before it", "not"):
                if when == "in it":
                    arm()
                elif when == "before it" and workers.rank() == slow:
                    time.sleep(seconds)
                losses.append(float(step(pipe, example).loss))
                said.append(heard.take())
    finally:
        logging.getLogger("fxchimera").removeHandler(heard)
    return said, losses
