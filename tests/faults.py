"""Faults planted in a step: what happens, on which rank, in which of its forwards, and what all ranks must then say."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.local.toys import WIDTH, chain, data, seeded
from tests.models import Example

__all__ = [
    "HARMLESS", "IN_USER_CODE", "LATE_SECONDS", "OF_PROCESSES", "STUCK", "STUCK_SECONDS", "WAIT_SECONDS", "Fault", "PlantedError",
    "faults", "in_thread_of", "plant", "throw",
]  # fmt: skip

N = 4


class PlantedError(Exception):
    """What the planted faults raise where the kind does not say otherwise."""


@dataclass(frozen=True, slots=True)
class Fault:
    """``kind`` happens on rank ``victim`` in the ``call``-th forward of a layer there, counted from 1, or ``call``-th loss."""

    kind: str
    victim: int
    call: int


# kind -> what the error must tell
IN_USER_CODE = {
    "forward": "PlantedError: in forward",
    "backward": "PlantedError: in backward",
    "loss": "PlantedError: in the loss",
    "stop iteration": "StopIteration: planted",
    "memory": "MemoryError: planted (the plan predicted ",
    "device memory": "OutOfMemoryError: planted (the plan predicted ",
    "extra call": "FxChimeraError: the pipeline is at work for another call",
    "thrown": "PlantedError: ",
    "interrupted": "KeyboardInterrupt: planted",
    "exit": "SystemExit: planted",
}
STUCK = {"stuck": "has waited {:g} s for it; it is at: stage "}  # alive, but it does not come back from the user's code in time
OF_PROCESSES = {"kill": "is gone", "stop": "has been stopped", "leave": "is gone"}
HARMLESS = ("late", "busy", "nap")
LATE_SECONDS = 3.0
WAIT_SECONDS, STUCK_SECONDS = 1.5, 4.0

_RAISED: dict[str, BaseException] = {
    "forward": PlantedError("in forward"),
    "stop iteration": StopIteration("planted"),
    "memory": MemoryError("planted"),
    "device memory": torch.OutOfMemoryError("planted"),
    "interrupted": KeyboardInterrupt("planted"),
    "exit": SystemExit("planted"),
}


def faults(kind: str, stages: int) -> list[Fault]:
    """One kind at six places: all over the pipeline, early and late; the last rank computes a loss at least twice."""
    places = [(0, 1), (1, 2), (stages - 1, 1), (0, 4), (stages // 2, 3), (stages - 1, 4)]
    if kind == "loss":
        return [Fault(kind, stages - 1, 1 + i % 2) for i in range(len(places))]
    return [Fault(kind, victim, call) for victim, call in places]


def plant(fault: Fault, on_victim: Callable[[], bool], seconds: float = LATE_SECONDS) -> tuple[Example, Callable[..., None]]:
    """Make an example, and a function that makes the fault due, at its place or in another forward.

    ``on_victim`` tells whether it is called on the victim; ``seconds`` is how long a harmless one takes.  The function's second
    argument is what an extra call calls.
    """
    x, target = data(2 * N, WIDTH)
    model, left = seeded(lambda: chain(4)), [0]
    calls: list[Callable[[], object]] = []

    def due() -> bool:
        if not left[0] or not on_victim():
            return False
        left[0] -= 1
        return left[0] == 0

    def before(module: nn.Module, inputs: tuple[Tensor]) -> None:
        if fault.kind != "loss" and due():
            (calls[0] if fault.kind == "extra call" else partial(_strike, fault.kind, inputs[0], seconds))()

    def loss_fn(output: Tensor, wanted: Tensor) -> Tensor:
        if fault.kind == "loss" and due():
            raise PlantedError("in the loss")
        return F.mse_loss(output, wanted)

    for layer in model.children():
        layer.register_forward_pre_hook(before)

    def arm(call: int = fault.call, extra: Callable[[], object] | None = None) -> None:
        left[0] = call
        calls[:] = [extra] if extra is not None else []

    return Example(model, (x,), {}, target, loss_fn), arm


def _strike(kind: str, x: Tensor, seconds: float) -> None:
    if kind in _RAISED:
        raise _RAISED[kind]
    if kind == "backward":
        (x if x.requires_grad else x.requires_grad_()).register_hook(_raise_in_backward)
    elif kind == "leave":
        os._exit(0)
    elif kind in ("late", "nap", "stuck"):
        time.sleep(STUCK_SECONDS if kind == "stuck" else seconds)
    elif kind == "thrown":
        throw(threading.get_ident(), PlantedError)
    elif kind == "busy":
        ctypes.PyDLL(None).usleep(int(1e6 * seconds))  # with the interpreter to itself
    else:
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])


def throw(thread: int, error: type[BaseException]) -> None:
    """Raise an exception in a thread from outside, as debuggers and tools that limit time do."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def _raise_in_backward(gradient: Tensor) -> None:
    raise PlantedError("in backward")


def in_thread_of(rank: int) -> Callable[[], bool]:
    """Tells whether it is called in the thread of a rank of a pipeline of several threads."""
    return lambda: threading.current_thread().name == f"fxchimera-rank-{rank}"
