"""Bring the ranks' results together, the same on every rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxchimera.runtime.batches.loss import total_loss
from fxchimera.runtime.microbatch import Batch, device_of
from fxchimera.runtime.processes.world import World
from fxchimera.runtime.steps.job import Result
from fxchimera.schedule.timeline import Timeline
from fxchimera_passes.captured import Answer
from fxchimera_passes.structure import flatten

__all__ = ["Losses", "Verdict", "gather_answers", "gather_failure", "gather_losses", "gather_outputs", "gather_timeline"]

_NONE = torch.iinfo(torch.int64).max
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)  # without slots, for what is worked out once
class Losses:
    """The losses of all micro-batches of all pipelines, numbered pipeline by pipeline, and their weights in the batch's."""

    losses: dict[int, float]
    weights: tuple[float, ...]
    dtype: torch.dtype

    @functools.cached_property
    def total(self) -> torch.Tensor:
        """The batch's loss, in the losses' dtype."""
        return total_loss(self.losses, self.weights, self.dtype)

    @property
    def not_finite(self) -> dict[int, float]:
        """Those losses that count and are nan or infinite."""
        return {m: loss for m, loss in sorted(self.losses.items()) if self.weights[m] and not math.isfinite(loss)}


def gather_losses(world: World, results: Sequence[Result], weights: tuple[float, ...]) -> Losses:
    """Collective: return the losses of all micro-batches.

    One small tensor a rank travels: present flags, losses in double precision (exact for every dtype), the dtype's number, and
    the weights.
    """
    own = on_host({m: loss for result in results for m, loss in result.losses.items()})
    kinds = [1.0 + _DTYPES.index(loss.dtype) for loss in own.values()]
    present = [float(m in own) for m in range(len(weights))] + [kinds[0] if kinds else 0.0]
    values = [float(own[m]) if m in own else math.nan for m in range(len(weights))] + [math.nan]
    losses: dict[int, float] = {}
    everyones = [0.0] * (len(weights) * world.grid.width)
    dtype = torch.float32
    rows = torch.tensor([present, values, [*weights, math.nan]], dtype=torch.float64, device="cpu")
    pipelines = {process: pipeline for pipeline, row in enumerate(world.grid.processes) for process in row}
    for process, gathered in enumerate(world.gather(rows, "the loss")):
        (*found, kind), (*numbers, _), (*shares, _) = gathered.tolist()
        first = pipelines[process] * len(weights)
        losses |= {first + m: number for m, number in enumerate(numbers) if found[m]}
        everyones[first : first + len(weights)] = shares
        if kind:
            dtype = _DTYPES[int(kind) - 1]
    return Losses(losses, tuple(everyones), dtype)


def on_host(losses: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Bring losses to the CPU, all of a device at once, as the host waits for each read."""
    found = {m: loss for m, loss in losses.items() if loss.device.type == "cpu"}
    for device in dict.fromkeys(loss.device for loss in losses.values() if loss.device.type != "cpu"):
        there = {m: loss for m, loss in losses.items() if loss.device == device}
        found |= zip(there, torch.stack(list(there.values())).cpu(), strict=True)
    return found


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the ranks together know of a run that assumed answers.

    ``wrong`` is the first wrong assumption of each micro-batch of this pipeline that had one: its ordinal and the true answer;
    ``settled`` tells that no pipeline has any.  ``broken`` are the micro-batches that failed although all answers were right, and
    ``failed`` tells that some pipeline has one; while answers were wrong, a buffer may hold what should not be there.
    """

    wrong: dict[int, tuple[int, Answer]]
    broken: frozenset[int]
    settled: bool
    failed: bool


def gather_answers(world: World, results: Sequence[Result], n_microbatches: int) -> Verdict:
    """Collective: judge a run that assumed answers."""
    words = torch.full((3, n_microbatches), _NONE, dtype=torch.int64, device="cpu")
    for result in results:
        for microbatch, answers in result.answers.items():
            first = min(answers)
            if first < words[0, microbatch]:
                words[:2, microbatch] = torch.tensor([first, answers[first]], device="cpu")
        for microbatch, _ in result.broken:
            words[2, microbatch] = 0
    everyone = torch.stack(world.gather(words, "the answers that the forward read"))
    settled = bool((everyone[:, 0] == _NONE).all())
    failed = settled and bool((everyone[:, 2] == 0).any())
    everything = everyone[list(dict.fromkeys(world.grid.row))]
    firsts, processes = everything[:, 0].min(0)
    wrong = {m: (int(firsts[m]), int(everything[processes[m], 1, m])) for m in range(n_microbatches) if firsts[m] != _NONE}
    broken = {m for m in range(n_microbatches) if (everything[:, 2, m] == 0).any()}
    return Verdict(wrong, frozenset(broken) if failed else frozenset(), settled, failed)


def gather_failure(world: World, results: Sequence[Result], broken: Collection[int]) -> BaseException:
    """Collective: return the error that every rank raises because micro-batches are ``broken``."""
    own = [error for result in results for (microbatch, _), error in sorted(result.broken.items()) if microbatch in broken]
    cause = world.failure.cause_at(own[0].cause.rank, own[0].cause.text) if own else None
    gathered = world.gather_objects(cause, "what failed")
    failure = world.failure.report(next(cause for cause in gathered if cause is not None)).error()
    failure.__cause__ = own[0].error if own else None
    return failure


def gather_outputs(world: World, results: Sequence[Result], batch: Batch) -> list[Any]:
    """Collective: return the outputs of all micro-batches of this pipeline, ascending, on the device where ``batch`` is."""
    device = device_of(batch)
    own = {m: _moved(output, device) for result in results for m, output in result.outputs.items()}
    everything = {m: output for process in world.gather_in_pipeline(own, "the outputs") for m, output in process.items()}
    return [everything[microbatch] for microbatch in sorted(everything)]


def _moved(output: Any, device: torch.device) -> Any:
    tensors, structure = flatten(output)
    if all(tensor.device == device for tensor in tensors):
        return output
    return structure.rebuild([tensor.to(device) for tensor in tensors])


def gather_timeline(world: World, timeline: Timeline | None) -> Timeline | None:
    """Collective: return the measured timeline of all ranks of pipeline 0, starting at 0; None when no step has run."""
    own = timeline if world.grid.pipeline == 0 else None
    parts = [part for part in world.gather_objects(own, "draw() or trace()") if part is not None]
    if not parts:
        return None
    events = [event for part in parts for event in part.events]
    return Timeline(parts[0].name, parts[0].placement, tuple(sorted(events, key=lambda e: (e.start, e.rank, e.end))))
