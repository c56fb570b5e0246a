"""Wrapping, training and closing again and again: what is left of it in threads, open files and memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.nn.functional as F

from fxchimera.runtime.failures.pulse import Pulse
from fxchimera.runtime.failures.sharedfailure import SharedFailure
from tests.local.toys import WIDTH, chain, data, seeded
from tests.local.wrapped import step, wrap
from tests.models import Example

__all__ = ["Left", "cycles", "late_threads"]

_WARM = 3  # cycles, and as many as those that count, fill the caches of torch, the allocator and the interpreter; see below
_END_SECONDS = 10.0  # for a thread that has been told to end; on a busy machine it may not have run yet


@dataclass(frozen=True, slots=True)
class Left:
    """What there is after the cycles that was not there before: the names of threads and of open files, and resident bytes."""

    threads: tuple[str, ...]
    files: tuple[str, ...]
    resident: int


def cycles(count: int, stages: int, schedule: str) -> Left:
    """Make a pipeline, take a step and close it, ``count`` times, after as many to warm up.

    Resident memory of a process grew by 49, 2.6, 1.1, 0.7, 0.5, 0.1, 0.2, 0.3, 0.6 and 0.0 MB in ten times 50 cycles: it comes to
    rest, so it is what allocators and caches fill up with, and not what a cycle leaves.
    """
    for _ in range(_WARM + count):
        _cycle(stages, schedule)
    threads, files, resident = set(threading.enumerate()), _files(), _resident()
    for _ in range(count):
        _cycle(stages, schedule)
    started = _after(threads)
    more = _resident() - resident
    return Left(tuple(sorted(thread.name for thread in started)), tuple(sorted(_files() - files)), more)


def late_threads(seconds: float) -> tuple[str, ...]:
    """As :func:`cycles`, once, with the failure channel's threads first running after ``seconds``, except on rank 0.

    Returns the names of the threads that are left.
    """
    before = set(threading.enumerate())
    pulse, watcher = Pulse._run, SharedFailure._watch

    def later(run: Callable[[Any], None]) -> Callable[[Any], None]:
        late = os.environ["RANK"] != "0"
        return lambda channel: (time.sleep(seconds if late else 0.0), run(channel))[1]

    with patch.object(Pulse, "_run", later(pulse)), patch.object(SharedFailure, "_watch", later(watcher)):
        _cycle(2, "chimera")
    gc.collect()  # rank 0's store goes
    return tuple(sorted(thread.name for thread in _after(before)))


def _after(before: set[threading.Thread]) -> set[threading.Thread]:
    """The threads that are left."""
    deadline = time.monotonic() + _END_SECONDS
    while (started := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    return started


def _cycle(stages: int, schedule: str) -> None:
    x, target = data(8, WIDTH)
    example = Example(seeded(lambda: chain(4)), (x,), {}, target, F.mse_loss)
    with wrap(example, stages, 4, schedule) as pipe:
        step(pipe, example)


def _files() -> set[str]:
    """The open files, each as what it is: a path, or a socket with a number of its own."""
    gc.collect()
    found = set()
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing itself was one of them
            found.add(os.readlink(f"/proc/self/fd/{handle}"))
    return found


def _resident() -> int:
    """What is in use: the allocator's own reserves, which come and go with threads, are given back first."""
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc's
        trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
