"""What runs in the processes of the tests of failures: a step in which one rank is killed, stopped, or late."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from torch import nn

from tests import workers
from tests.local.toys import chain, data, seeded
from tests.local.wrapped import wrap
from tests.models import Example

__all__ = ["Ending", "meet"]

Ending = tuple[str, str, float, float]  # the error's class and text ("" without one), seconds of the step, and of close()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _leave() -> None:
    os._exit(0)


def _run_late() -> None:
    time.sleep(3.0)


_WAYS = {"kill": _kill, "stop": _stop, "leave": _leave, "late": _run_late}


def _outcome(call: Callable[[], object]) -> tuple[str, str, float]:
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def meet(stages: int, schedule: str, victim: int, way: str, call: int) -> Ending:
    """Train; in the forward number ``call`` of a second step the blow falls on ``victim``; everybody tells how the step ended."""
    x, target = data(8, 6)
    model = seeded(lambda: chain(stages))
    calls: list[int] = []

    def hook(module: nn.Module, inputs: object) -> None:
        if calls:
            calls[0] -= 1
            if calls[0] == 0:
                _WAYS[way]()

    for layer in model.children():
        layer.register_forward_pre_hook(hook)
    example = Example(model, (x,), {}, target, nn.functional.mse_loss)
    pipe = wrap(example, stages, 4, schedule, wait_seconds=50.0)
    pipe.step(x, target=target)
    if workers.rank() == victim:
        calls.append(call)
    error, text, seconds = _outcome(lambda: pipe.step(x, target=target))
    began = time.monotonic()
    pipe.close()
    return error, text, seconds, time.monotonic() - began
