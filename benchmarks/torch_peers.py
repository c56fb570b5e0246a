"""The peers: torch.distributed.pipelining's own schedules on sleeping stages, and what each would take with free communication."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sleeping import SleepingStage, squared_error
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import get_schedule_class

__all__ = ["PEERS", "Peer", "ideal_seconds", "make_peer"]

PEERS = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "ZBVZeroBubble": 2}  # name -> stages a device
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)$")  # torch's text form of a compute action: stage, kind, micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One of torch's schedules on this rank."""

    name: str
    schedule: Any
    first: bool
    last: bool
    num_stages: int
    num_devices: int
    n_microbatches: int

    @property
    def actions(self) -> float:
        """Computations of a step on a rank, on average."""
        if self.num_stages == self.num_devices:
            return 2.0 * self.n_microbatches
        return sum(action is not None for actions in self.schedule.pipeline_order.values() for action in actions) / self.num_devices

    def step_function(self, batch: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        """Return a function that runs one training step as torch wants it on this rank."""
        args = (batch,) if self.first else ()
        kwargs = {"target": target} if self.last else {}
        return lambda: self.schedule.step(*args, **kwargs)


def make_peer(name: str, rank: int, devices: int, microbatches: int, forward: float, backward: float, width: int) -> Peer:
    """Build the schedule on this rank; ``forward`` and ``backward`` are a device's seconds, divided among its stages.

    Raises ``ValueError``, torch's own, where the schedule refuses these numbers.
    """
    per_device = PEERS[name]
    total = devices * per_device
    mine = [rank] if per_device == 1 else [rank, total - 1 - rank] if name.startswith("ZBV") else [rank, rank + devices]
    stages = [
        pipelining.PipelineStage(
            SleepingStage(width, forward / per_device, backward / per_device, first=i == 0), i, total, torch.device("cpu")
        )
        for i in mine
    ]
    schedule = get_schedule_class(name)(stages if per_device > 1 else stages[0], microbatches, loss_fn=squared_error)
    return Peer(
        name=name,
        schedule=schedule,
        first=0 in mine,
        last=total - 1 in mine,
        num_stages=total,
        num_devices=devices,
        n_microbatches=microbatches,
    )


def ideal_seconds(peer: Peer, forward: float, backward: float) -> float:
    """Return the makespan with free communication: closed form for one stage a device, else the schedule's own order replayed."""
    if peer.num_stages == peer.num_devices:
        return (peer.n_microbatches + peer.num_devices - 1) * (forward + backward)
    share = peer.num_devices / peer.num_stages
    order = {rank: [str(action) for action in actions if action] for rank, actions in peer.schedule.pipeline_order.items()}
    return _replay(order, peer.num_stages, forward * share, backward * share)


def _replay(order: dict[int, list[str]], num_stages: int, forward: float, backward: float) -> float:
    """Run every rank's list as early as its dependencies allow and return when the last action ends.

    ``I`` and ``W`` take half a backward each, except on stage 0, where torch has no input gradient and does all in ``W``.
    """
    done: dict[tuple[str, int, int], float] = {}
    clock = dict.fromkeys(order, 0.0)
    position = dict.fromkeys(order, 0)
    actions = {rank: [_parse(text) for text in texts] for rank, texts in order.items()}
    while any(position[rank] < len(actions[rank]) for rank in order):
        moved = False
        for rank in order:
            while position[rank] < len(actions[rank]):
                kind, stage, microbatch = actions[rank][position[rank]]
                needs = _needs(kind, stage, microbatch, num_stages)
                if any(need not in done for need in needs):
                    break
                start = max([clock[rank], *(done[need] for need in needs)])
                clock[rank] = done["F" if kind == "F" else "W" if kind == "W" else "I", stage, microbatch] = start + _seconds(
                    kind, stage, forward, backward
                )
                position[rank] += 1
                moved = True
        if not moved:
            raise RuntimeError(f"the order waits for ever; the ranks stand at {position}")
    return max(clock.values())


def _parse(text: str) -> tuple[str, int, int]:
    match = _ACTION.match(text)
    if match is None:
        raise ValueError(f"{text!r} is no compute action")
    return match[2], int(match[1]), int(match[3])


def _needs(kind: str, stage: int, microbatch: int, num_stages: int) -> list[tuple[str, int, int]]:
    if kind == "F":
        return [("F", stage - 1, microbatch)] if stage else []
    if kind == "W":
        return [("I", stage, microbatch)]
    own = [("F", stage, microbatch)]
    return own if stage == num_stages - 1 else [*own, ("I", stage + 1, microbatch)]


def _seconds(kind: str, stage: int, forward: float, backward: float) -> float:
    halves = {"F": forward, "B": backward, "I": 0.0 if stage == 0 else backward / 2, "W": backward if stage == 0 else backward / 2}
    return halves[kind]
