"""Bring the ranks' results together, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fxchimera.runtime.job import Result
from fxchimera.runtime.loss import total_loss
from fxchimera.runtime.world import World
from fxchimera.schedule.timeline import Timeline

__all__ = ["gather_loss", "gather_outputs", "gather_timeline"]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def gather_loss(world: World, results: Sequence[Result], weights: tuple[float, ...]) -> torch.Tensor:
    """Collective: return the weighted sum of all micro-batches' losses, in the losses' dtype.

    One small tensor a rank travels: present flags, losses in double precision (exact for every dtype), and the dtype's number.
    """
    own = {m: loss for result in results for m, loss in result.losses.items()}
    words = torch.full((2, len(weights) + 1), math.nan, dtype=torch.float64, device="cpu")
    words[0] = 0.0
    for microbatch, loss in own.items():
        words[0, microbatch], words[1, microbatch] = 1.0, loss.to("cpu", torch.float64)
        words[:, -1] = 1.0 + _DTYPES.index(loss.dtype)
    losses: dict[int, torch.Tensor] = {}
    dtype = torch.float32
    for process in world.gather(words, "the loss"):
        losses |= {m: process[1, m] for m in range(len(weights)) if process[0, m]}
        if process[0, -1]:
            dtype = _DTYPES[int(process[0, -1]) - 1]
    return total_loss(losses, weights, dtype)


def gather_outputs(world: World, results: Sequence[Result]) -> list[Any]:
    """Collective: return the outputs of all micro-batches, ascending."""
    own = {m: output for result in results for m, output in result.outputs.items()}
    everything = {m: output for process in world.gather_objects(own, "the outputs") for m, output in process.items()}
    return [everything[microbatch] for microbatch in sorted(everything)]


def gather_timeline(world: World, timeline: Timeline | None) -> Timeline | None:
    """Collective: return the measured timeline of all ranks, starting at 0; None when no step has run."""
    parts = [part for part in world.gather_objects(timeline, "draw() or trace()") if part is not None]
    if not parts:
        return None
    events = [event for part in parts for event in part.events]
    return Timeline(parts[0].name, parts[0].placement, tuple(sorted(events, key=lambda e: (e.start, e.rank, e.end))))
