"""What the machine adds to a sleeping device: how much longer than its sleep a stage takes, and how long a message is on its way.

Both are measured as a schedule meets them, with plain torch: all ranks run a sleeping stage at once, whose code has gone cold while
it slept, and a message goes over gloo to a rank that has waited for it.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from sleeping import SleepingStage

__all__ = ["hop_seconds", "stage_excess_seconds"]

_ROUNDS = 20
_PAUSE_SECONDS = 0.005  # long enough for caches and cores to go cold, as between the messages of a schedule


def stage_excess_seconds(forward: float, backward: float, shape: tuple[int, int]) -> tuple[float, float]:
    """Return by how much a stage's forward, and half its backward, last longer than their sleeps; the middle of the ranks' medians.

    ``forward`` and ``backward`` are the stage's sleeps in seconds, ``shape`` that of a micro-batch.
    """
    stage = SleepingStage(shape[1], forward, backward, first=False)
    times = []
    dist.barrier()
    for _ in range(_ROUNDS):
        x = torch.zeros(shape, requires_grad=True)
        start = time.monotonic()
        output = stage(x)
        middle = time.monotonic()
        output.backward(torch.ones(shape))
        times.append((middle - start - forward, (time.monotonic() - middle - backward) / 2))
    forwards, halves = zip(*times, strict=True)
    return _middle(statistics.median(forwards)), _middle(statistics.median(halves))


def hop_seconds(boundary_bytes: int) -> float:
    """Return the seconds from the start of a send to the return of the receive, between neighbouring ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    buffer = torch.zeros(max(1, boundary_bytes // 8), dtype=torch.float64)  # the first value is when it was sent
    times = []
    for _ in range(_ROUNDS):
        for source in range(size - 1):
            if rank == source:
                time.sleep(_PAUSE_SECONDS)
                buffer[0] = time.monotonic()
                dist.send(buffer, source + 1)
            elif rank == source + 1:
                dist.recv(buffer, source)
                times.append(time.monotonic() - float(buffer[0]))
    return _middle(statistics.median(times) if times else float("nan"))


def _middle(value: float) -> float:
    """Return the median over the ranks that have a value."""
    values = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.tensor([value], dtype=torch.float64))
    return statistics.median(found for one in values if (found := float(one)) == found)
