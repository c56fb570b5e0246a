"""The recordings of one model: one program per micro-batch signature, all cut at the same places.

A recording bakes shapes and Python values in, so another batch size, sequence length, mode or flag is recorded once more (on fake
tensors: a rank may not have the other stages' weights any more) and kept.  The cut and the owners never change.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.microbatch import Batch, MicroBatch
from fxchimera.runtime.settings import Settings, Snapshot
from fxchimera.runtime.stages.again import again_for
from fxchimera.runtime.stages.compiled import Compiler, StageModule, in_turn
from fxchimera_passes.capture import recapture
from fxchimera_passes.capture.paths import Path
from fxchimera_passes.captured import Answer, Captured, TensorMeta
from fxchimera_passes.errors import CaptureError, PartitionError
from fxchimera_passes.keyed import microbatch_randomness
from fxchimera_passes.plan import Stage, StagePlan
from fxchimera_passes.split import StageGraph, split
from fxchimera_passes.stages import transfer
from fxchimera_passes.targets import CountedTargets, counted_targets

__all__ = ["KEPT", "Program", "Programs"]

KEPT = 64  # recordings by signature and settings; the least recently used go first
_MANY = 16
_ADVICE = (
    "Pass values that change in every step as tensors, not as arguments or attributes",
    "Move branches on such values into submodules, which are kept whole",
)
_LACKING = (
    "This recording, for another signature or mode than at wrap, was made on a rank that has no values for {} parameters ({!r} "
    "first), which other ranks own; if a module computes with such values, call pipe.warmup(<arguments>, lend_parameters=True) on "
    "every rank before"
)


Shell = Callable[[StageModule], StageModule]


@dataclass(frozen=True, eq=False)
class Program:
    """One recording, cut into stages; ``counted_targets`` belong to the loss that the model computes itself, if it can be seen.

    With a ``compiler`` its stages run compiled; ``shells`` make of a stage of this process what the user has parallelized.
    """

    captured: Captured
    plan: StagePlan
    graphs: tuple[StageGraph, ...]
    counted_targets: CountedTargets | None
    compiler: Compiler | None = None
    shells: Mapping[int, Shell] = field(default_factory=dict)

    @classmethod
    def of(cls, captured: Captured, plan: StagePlan, compiler: Compiler | None = None) -> Program:
        """Cut a recording as ``plan`` says."""
        return cls(captured, plan, split(captured, plan), counted_targets(captured), compiler)

    def bind(self, stage: int, root: nn.Module, device: torch.device | None = None) -> StageModule:
        """Make ``stage`` ready to run on ``device`` and the modules of ``root``, the model or a clone of it."""
        graph = self.graphs[stage]
        made = self.compiler.bind(graph, root, device) if self.compiler is not None else None
        if made is None:
            made = in_turn(graph.bind(root, device=device, again=again_for(graph.stage.recompute)), graph, root)
        shell = self.shells.get(stage)
        return made if shell is None else shell(made)

    def follows(self, answers: Sequence[Answer]) -> bool:
        """Tell whether these are the first answers that the recording assumes."""
        assumed = [assumption.answer for assumption in self.captured.assumed[: len(answers)]]
        return assumed == list(answers)

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
    word: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "word", hash((self.arguments, self.tensors, self.settings)))

    def __hash__(self) -> int:
        return self.word


class Programs:
    """Finds, or records, the programs of a batch; ``present`` is what the user had set on the model when it last did.

    ``recordings`` counts those made after wrapping; ``device`` is where the example batch was.
    """

    def __init__(self, captured: Captured, plan: StagePlan, example: MicroBatch, compiler: Compiler | None = None) -> None:
        self._compiler = compiler
        self._captured = captured
        self._plan = plan
        self._settings = Settings(captured.model, captured.report.stateful)
        self.recordings = 0
        self.device = example.inputs[0].device if example.inputs else torch.device("cpu")
        self._unasked = 0
        self._asked = self._sealed = False
        self._values: Mapping[str, torch.Tensor] = {}
        self.first = Program.of(captured, plan, compiler)
        self.present = self._settings.look()
        self._latest = self._key(example, self.present)
        self._chosen: dict[tuple[_Key, int], Program] = {}
        self._good: dict[tuple[_Key, int], Program] = {}
        self._likely: dict[int, Path] = {}
        self._cache: OrderedDict[_Key, list[Program]] = OrderedDict({self._latest: [self.first]})
        self._keys = {self._latest: self._latest}  # so that equal keys are mostly one object, which is found without a comparison

    def find(
        self,
        batch: Batch,
        accept: Callable[[Program], None] | None = None,
        *,
        seed: int = 0,
        step: int = 0,
        paths: Mapping[int, Path] | None = None,
    ) -> tuple[Program, ...]:
        """Return the program of each micro-batch, with the model as it is set at present, recording it if need be.

        ``accept`` may refuse a new recording by raising.  ``seed`` and ``step`` name the keyed randomness, which decides the path
        through a model that leaves layers out at random; ``paths`` are known from a run that assumed wrong, by micro-batch.

        Raises:
            CaptureError: The model cannot be recorded for this signature.
            PartitionError: The cut does not fit the new recording.
        """
        self.present = self._settings.look()
        self._chosen, found = {}, list[Program]()
        keys: dict[Hashable, _Key] = {}
        unconditional: dict[_Key, Program] = {}  # the only recordings of their keys, and fit any values
        for microbatch in batch.microbatches:
            path = (paths or {}).get(microbatch.index)
            key = keys.get(microbatch.form)  # most often one for all
            if key is None:
                key = self._key(microbatch, self.present)
                key = keys[microbatch.form] = self._keys.setdefault(key, key)
            program = unconditional.get(key) if path is None else None
            if program is None:
                with microbatch_randomness(seed, step, microbatch.number):
                    program = self._find(microbatch, key, accept, path)
                if len(self._cache[key]) == 1 and not program.captured.guards and not program.captured.assumed:
                    unconditional[key] = program
            found.append(program)
            self._chosen[key, microbatch.index] = program
        return tuple(found)

    def succeeded(self) -> None:
        """The programs found last have run and assumed right: they are tried first when their micro-batches come again."""
        self._good |= self._chosen
        self._likely |= {index: Path(hints=program.captured.assumed) for (_, index), program in self._chosen.items()}

    @contextmanager
    def in_advance(self, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Inside, the user has asked for the recordings: they are not warned about.

        ``values`` are those of parameters that this rank has as meta tensors, by canonical name, for modules that need them while
        they are recorded.
        """
        self._asked, self._values = True, values
        try:
            yield
        finally:
            self._asked, self._values = False, {}

    def seal(
        self,
        batch: Batch,
        recorded: Sequence[tuple[Callable[[], AbstractContextManager[None]], Sequence[Program]]],
        shells: Mapping[int, Shell],
    ) -> None:
        """Keep the recordings of ``batch``, by mode, for a model that was changed since and cannot be recorded any more."""
        known = dict.fromkeys(program for _, programs in recorded for program in programs)
        shelled = {program: replace(program, shells=shells) for program in (self.first, *known)}
        self.first, self._sealed = shelled[self.first], True
        self._settings = Settings(self._captured.model, self._captured.report.stateful)
        self._cache, self._keys, self._good, self._chosen = OrderedDict(), {}, {}, {}
        for mode, programs in recorded:
            with mode():
                self.present = self._settings.look()
                for microbatch, program in zip(batch.microbatches, programs, strict=True):
                    key = self._key(microbatch, self.present)
                    self._latest = self._keys.setdefault(key, key)
                    found = self._cache.setdefault(self._latest, [])
                    found += [shelled[program]] * (shelled[program] not in found)

    def _find(
        self, microbatch: MicroBatch, key: _Key, accept: Callable[[Program], None] | None, path: Path | None = None
    ) -> Program:
        known = self._cache.setdefault(key, [])
        self._cache.move_to_end(key)
        good = self._good.get((key, microbatch.index))
        path = path or self._likely.get(microbatch.index, Path(hints=self.first.captured.assumed))
        for program in known if good is None or good not in known else [good, *known]:
            if program.follows(path.answers) and all(guard.holds(microbatch.inputs) for guard in program.captured.guards):
                return program
        if self._sealed:
            raise FxChimeraError(
                f"{self._difference(key)} differ from those of the example batch, and a model with parallelized stages cannot be "
                "recorded again; pass batches like the example, with the model's modes as they were"
            )
        try:
            program = self._record(microbatch, path)
        except (CaptureError, PartitionError) as error:
            absent = [name for name, parameter in self._captured.model.named_parameters() if parameter.is_meta]
            if not absent or self._values:
                raise
            raise type(error)(f"{error} {_LACKING.format(len(absent), absent[0])}") from error
        captured = program.captured
        if accept is not None:
            accept(program)
        if captured.report.stateful:
            self._settings.ignore(captured.report.stateful)
        known.append(program)
        del known[:-KEPT]
        while len(self._cache) > KEPT:
            gone, _ = self._cache.popitem(last=False)
            self._keys.pop(gone, None)
            self._good = {place: program for place, program in self._good.items() if place[0] != gone}
        self._count(key)
        return program

    def _record(self, microbatch: MicroBatch, path: Path) -> Program:
        """Record for a micro-batch; in evaluation without key-value caches where they cannot cross the cut."""
        training = self._captured.model.training
        record = partial(
            recapture, self._captured, microbatch.args, microbatch.kwargs, training=training, values=self._values, path=path
        )
        captured = record()
        try:
            return Program.of(captured, transfer(self._captured, self._plan, captured), self._compiler)
        except PartitionError:
            if training:
                raise
            captured = record(cache=False)
            warnings.warn("the model's key-value caches cannot cross the cuts and are left out of its output", stacklevel=2)
            return Program.of(captured, transfer(self._captured, self._plan, captured), self._compiler)

    def _count(self, key: _Key) -> None:
        self.recordings += 1
        self._unasked += not self._asked
        if self._unasked == _MANY and not self._asked:
            warnings.warn(
                f"the model has been recorded {_MANY} times after it was wrapped, last because {self._difference(key)} differ; "
                f"each recording costs time. {_ADVICE[key == self._latest]}",
                stacklevel=2,
            )
        self._latest = key

    def _difference(self, key: _Key) -> str:
        if key == self._latest:
            return "the answers of values that its forward reads"
        if key.arguments != self._latest.arguments:
            return "the arguments that are no tensors"
        if key.tensors != self._latest.tensors:
            return "the shapes of the tensors"
        return self._settings.difference(key.settings, self._latest.settings)

    @staticmethod
    def _key(microbatch: MicroBatch, present: Snapshot) -> _Key:
        tensors = tuple((TensorMeta.of(tensor), str(tensor.device)) for tensor in microbatch.inputs)
        return _Key(microbatch.arguments, tensors, present)
