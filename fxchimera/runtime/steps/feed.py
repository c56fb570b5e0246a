"""The batch on its way to a rank's device: copied on a stream of its own, a little ahead of the forwards that read it.

    inputs    copy 0  copy 1          copy 2          ...
    compute           wait F0         wait F1         ...

Only what the rank's stages read is copied.  A copy does not hold up the host if it comes from pinned memory, so what is not pinned
(by ``DataLoader(pin_memory=True)``, say) is put there first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fxchimera.runtime.devices.lanes import Lane
from fxchimera.runtime.devices.streams import is_host
from fxchimera.runtime.microbatch import Batch, MicroBatch
from fxchimera.runtime.steps.job import Job
from fxchimera.runtime.steps.script import Cue
from fxchimera.runtime.weights.moving import move_model
from fxchimera.schedule.action import Kind
from fxchimera_passes.structure import flatten

__all__ = ["Fed", "Feed", "all_on", "batch_on", "feed_of", "moved"]

_AHEAD = 2  # forwards whose inputs are on their way while another one runs


@dataclass(frozen=True, slots=True)
class Fed:
    """What one forward reads, on its device: the input tensors by position, and the target."""

    inputs: Mapping[int, torch.Tensor]
    target: Any


@dataclass(frozen=True, slots=True)
class _Order:
    """What one forward will read: the positions of its inputs, and whether the target."""

    microbatch: int
    positions: tuple[int, ...]
    target: bool


class Host:
    """Gives forwards on the CPU the batch as it is."""

    def __init__(self, microbatches: Sequence[MicroBatch]) -> None:
        self._microbatches = microbatches

    def take(self, microbatch: int) -> MicroBatch:
        """Return the micro-batch."""
        return self._microbatches[microbatch]


class Feed:
    """Brings one rank's inputs; forwards must ask in the order of ``cues``."""

    def __init__(self, batch: Batch, lane: Lane, cues: Iterable[Cue], *, targets: bool) -> None:
        self._batch, self._lane = batch, lane
        self._orders = iter([_order(cue, targets) for cue in cues if cue.action.kind is Kind.F])
        self._coming: deque[tuple[int, Fed, torch.Event]] = deque()

    def take(self, microbatch: int) -> Fed:
        """Return what the next forward, of this micro-batch, reads; the rank's stream waits for it."""
        while len(self._coming) <= _AHEAD and self._start():
            pass
        number, fed, arrived = self._coming.popleft()
        assert number == microbatch, "forwards take their inputs in the order of the script"
        lane = self._lane
        lane.accelerator.wait(lane.compute, arrived)
        for tensor in (*fed.inputs.values(), *flatten(fed.target)[0]):
            lane.accelerator.keep(tensor, lane.compute)
        return fed

    def _start(self) -> bool:
        """Start the copies of one more forward; False when there is none."""
        order = next(self._orders, None)
        if order is None:
            return False
        lane, microbatch = self._lane, self._batch.microbatches[order.microbatch]
        lane.accelerator.use(lane.inputs)
        try:
            inputs = {position: self._copy(microbatch.inputs[position]) for position in order.positions}
            target = None
            if order.target:
                target = microbatch.target_structure.rebuild([self._copy(tensor) for tensor in microbatch.targets])
            self._coming.append((order.microbatch, Fed(inputs, target), lane.accelerator.event(lane.inputs)))
        finally:
            lane.accelerator.use(lane.compute)
        return True

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return moved(tensor, self._lane.device)


def feed_of(job: Job, lane: Lane | None, cues: Iterable[Cue]) -> Feed | Host:
    """What gives the forwards of one rank their inputs in one job."""
    return Host(job.batch.microbatches) if lane is None else Feed(job.batch, lane, cues, targets=job.wants_loss)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor`` on ``device``: itself if it is there, else a copy that the host need not wait for."""
    if tensor.device == device:
        return tensor
    if is_host(tensor.device) and not tensor.is_pinned() and tensor.layout is torch.strided and not tensor.requires_grad:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def batch_on(batch: Batch, device: torch.device) -> Batch:
    """Return the whole batch on one device."""
    return replace(batch, microbatches=tuple(_microbatch_on(one, device) for one in batch.microbatches))


def all_on(device: torch.device | None, model: nn.Module, one: MicroBatch) -> MicroBatch:
    """Move a whole model to one device, and return a micro-batch there; None leaves both where they are."""
    if device is None:
        return one
    move_model(model, device)
    return _microbatch_on(one, device)


def _microbatch_on(one: MicroBatch, device: torch.device) -> MicroBatch:
    inputs, targets = (tuple(moved(tensor, device) for tensor in tensors) for tensors in (one.inputs, one.targets))
    return replace(one, inputs=inputs, targets=targets)


def _order(cue: Cue, targets: bool) -> _Order:
    assert cue.program is not None
    last = cue.action.stage == len(cue.program.plan.stages) - 1
    return _Order(cue.microbatch, cue.program.stage(cue.action.stage).inputs, last and targets)
