"""The recordings of one model: one program per micro-batch signature, all cut at the same places.

A recording bakes shapes and Python values in, so another batch size, sequence length, mode or flag is recorded once more (on fake
tensors: a rank may not have the other stages' weights any more) and kept.  The cut and the owners never change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxchimera.runtime.microbatch import MicroBatch, describe
from fxchimera_passes.capture import recapture
from fxchimera_passes.captured import Captured, TensorMeta
from fxchimera_passes.plan import Stage, StagePlan
from fxchimera_passes.split import StageGraph, split
from fxchimera_passes.stages import transfer
from fxchimera_passes.targets import CountedTargets, counted_targets

__all__ = ["Program", "Programs"]


@dataclass(frozen=True, eq=False)
class Program:
    """One recording, cut into stages; ``counted_targets`` belong to the loss that the model computes itself, if it can be seen."""

    captured: Captured
    plan: StagePlan
    graphs: tuple[StageGraph, ...]
    counted_targets: CountedTargets | None

    @classmethod
    def of(cls, captured: Captured, plan: StagePlan) -> Program:
        """Cut a recording as ``plan`` says."""
        return cls(captured, plan, split(captured, plan), counted_targets(captured))

    def stage(self, index: int) -> Stage:
        """Return stage ``index`` of the plan."""
        return self.plan.stages[index]

    def forward_metas(self, stage: int) -> tuple[TensorMeta, ...]:
        """Meta data of what ``stage`` receives from the stage before."""
        return tuple(value.meta for value in self.stage(stage).received)

    def backward_metas(self, stage: int) -> tuple[TensorMeta, ...]:
        """Meta data of the gradients that ``stage`` receives from the stage after."""
        return tuple(value.meta for value in self.stage(stage).sent if value.meta.requires_grad)


class Programs:
    """Finds, or records, the program of a micro-batch."""

    def __init__(self, captured: Captured, plan: StagePlan, example: MicroBatch) -> None:
        self._captured = captured
        self._plan = plan
        self.first = Program.of(captured, plan)
        self._cache: dict[Any, list[Program]] = {self._key(example): [self.first]}

    def find(self, microbatch: MicroBatch) -> Program:
        """Return the program that fits a micro-batch in the model's present mode, recording it if need be.

        Raises:
            CaptureError: The model cannot be recorded for this signature.
            PartitionError: The cut does not fit the new recording.
        """
        known = self._cache.setdefault(self._key(microbatch), [])
        for program in known:
            if all(guard.holds(microbatch.inputs) for guard in program.captured.guards):
                return program
        captured = recapture(self._captured, microbatch.args, microbatch.kwargs, training=self._captured.model.training)
        plan = transfer(self._captured, self._plan, captured)
        known.append(Program.of(captured, plan))
        return known[-1]

    def _key(self, microbatch: MicroBatch) -> Any:
        model = self._captured.model
        return (
            describe(microbatch.structure),
            tuple((TensorMeta.of(tensor), str(tensor.device)) for tensor in microbatch.inputs),
            _modes(model),
        )


def _modes(model: nn.Module) -> Any:
    """Everything outside the batch that a recording depends on."""
    device_type = "cpu"
    return (
        tuple(module.training for module in model.modules()),
        tuple(parameter.requires_grad for parameter in model.parameters()),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type),
    )
