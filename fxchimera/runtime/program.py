"""The recordings of one model: one program per micro-batch signature, all cut at the same places.

A recording bakes shapes and Python values in, so another batch size, sequence length, mode or flag is recorded once more (on fake
tensors: a rank may not have the other stages' weights any more) and kept.  The cut and the owners never change.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from fxchimera.runtime.microbatch import Batch, MicroBatch
from fxchimera.runtime.settings import Settings, Snapshot, frozen
from fxchimera_passes.capture import recapture
from fxchimera_passes.captured import Captured, TensorMeta
from fxchimera_passes.errors import PartitionError
from fxchimera_passes.keyed import microbatch_randomness
from fxchimera_passes.plan import Stage, StagePlan
from fxchimera_passes.split import StageGraph, split
from fxchimera_passes.stages import transfer
from fxchimera_passes.targets import CountedTargets, counted_targets

__all__ = ["Program", "Programs"]

_KEPT = 64  # recordings by signature and settings; the least recently used go first
_MANY = 16


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


@dataclass(frozen=True, slots=True)
class _Key:
    """What one recording fits: the arguments, the tensors among them, and all that the user can set on the model."""

    arguments: Hashable
    tensors: Hashable
    settings: Snapshot


class Programs:
    """Finds, or records, the programs of a batch; ``present`` is what the user had set on the model when it last did."""

    def __init__(self, captured: Captured, plan: StagePlan, example: MicroBatch) -> None:
        self._captured = captured
        self._plan = plan
        self._settings = Settings(captured.model, captured.report.stateful)
        self._recordings = 0
        self.first = Program.of(captured, plan)
        self.present = self._settings.look()
        self._latest = self._key(example, self.present)
        self._cache: OrderedDict[_Key, list[Program]] = OrderedDict({self._latest: [self.first]})

    def find(
        self, batch: Batch, accept: Callable[[Program], None] | None = None, *, seed: int = 0, step: int = 0
    ) -> tuple[Program, ...]:
        """Return the program of each micro-batch, with the model as it is set at present, recording it if need be.

        ``accept`` may refuse a new recording by raising.  ``seed`` and ``step`` name the keyed randomness, which decides the path
        through a model that leaves layers out at random.

        Raises:
            CaptureError: The model cannot be recorded for this signature.
            PartitionError: The cut does not fit the new recording.
        """
        self.present = self._settings.look()
        found = []
        for microbatch in batch.microbatches:
            with microbatch_randomness(seed, step, microbatch.index):
                found.append(self._find(microbatch, self._key(microbatch, self.present), accept))
        return tuple(found)

    def _find(self, microbatch: MicroBatch, key: _Key, accept: Callable[[Program], None] | None) -> Program:
        known = self._cache.setdefault(key, [])
        self._cache.move_to_end(key)
        for program in known:
            if all(guard.holds(microbatch.inputs) for guard in program.captured.guards):
                return program
        program = self._record(microbatch)
        captured = program.captured
        if accept is not None:
            accept(program)
        if captured.report.stateful:
            self._settings.ignore(captured.report.stateful)
        known.append(program)
        del known[:-_KEPT]
        while len(self._cache) > _KEPT:
            self._cache.popitem(last=False)
        self._count(key)
        return program

    def _record(self, microbatch: MicroBatch) -> Program:
        """Record for a micro-batch; in evaluation without key-value caches where they cannot cross the cut."""
        training = self._captured.model.training
        captured = recapture(self._captured, microbatch.args, microbatch.kwargs, training=training)
        try:
            return Program.of(captured, transfer(self._captured, self._plan, captured))
        except PartitionError:
            if training:
                raise
            captured = recapture(self._captured, microbatch.args, microbatch.kwargs, training=training, cache=False)
            warnings.warn("the model's key-value caches cannot cross the cuts and are left out of its output", stacklevel=2)
            return Program.of(captured, transfer(self._captured, self._plan, captured))

    def _count(self, key: _Key) -> None:
        self._recordings += 1
        if self._recordings == _MANY:
            warnings.warn(
                f"the model has been recorded {_MANY} times after it was wrapped, last because {self._difference(key)} differ; "
                "each recording costs time. Pass values that change in every step as tensors, not as arguments or attributes",
                stacklevel=2,
            )
        self._latest = key

    def _difference(self, key: _Key) -> str:
        if key.arguments != self._latest.arguments:
            return "the arguments that are no tensors"
        if key.tensors != self._latest.tensors:
            return "the shapes of the tensors"
        return self._settings.difference(key.settings, self._latest.settings)

    @staticmethod
    def _key(microbatch: MicroBatch, present: Snapshot) -> _Key:
        tensors = tuple((TensorMeta.of(tensor), str(tensor.device)) for tensor in microbatch.inputs)
        return _Key(frozen(microbatch.structure.spec), tensors, present)
