"""Wrapping, training and closing again and again: what is left of it in threads, open files and memory."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import torch.nn.functional as F

from tests.local.toys import WIDTH, chain, data, seeded
from tests.local.wrapped import step, wrap
from tests.models import Example

__all__ = ["Left", "cycles"]

_WARM = 3  # cycles, and a quarter of those that count, fill the caches of torch, the allocator and the interpreter


@dataclass(frozen=True, slots=True)
class Left:
    """How much more there is after the cycles than before: threads, open files, and resident bytes."""

    threads: int
    files: int
    resident: int


def cycles(count: int, stages: int, schedule: str) -> Left:
    """Make a pipeline, take a step and close it, ``count`` times."""
    for _ in range(_WARM + count // 4):
        _cycle(stages, schedule)
    before = _now()
    for _ in range(count):
        _cycle(stages, schedule)
    after = _now()
    return Left(*(now - then for now, then in zip(after, before, strict=True)))


def _cycle(stages: int, schedule: str) -> None:
    x, target = data(8, WIDTH)
    example = Example(seeded(lambda: chain(4)), (x,), {}, target, F.mse_loss)
    with wrap(example, stages, 4, schedule) as pipe:
        step(pipe, example)


def _now() -> tuple[int, int, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return threading.active_count(), len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")
