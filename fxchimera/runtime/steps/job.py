"""What the ranks are given to do, and what they bring back."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from fxchimera.runtime.batches.loss import LossFn
from fxchimera.runtime.failures.failure import Cause
from fxchimera.runtime.microbatch import Batch
from fxchimera.runtime.settings import Snapshot
from fxchimera.runtime.stages.program import Program
from fxchimera.schedule.order import Order
from fxchimera.schedule.timeline import Event
from fxchimera_passes.captured import Answer
from fxchimera_passes.keyed import microbatch_randomness

__all__ = ["Broken", "Job", "Result"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One step or forward-only call, the same on every rank.

    ``weights`` are the micro-batches' shares of the loss, which is that of all pipelines' batches; ``pending_steps`` the steps
    whose statistics the exchange carries (this one last); ``settings`` what the user has set on the model; ``train`` asks for
    backwards and the exchange, ``wants_loss`` and ``wants_outputs`` for what the last stage returns.  The attributes that a
    ``trial`` leaves in clones can be put back.  In another pipeline ``others_assume`` may hold.  What stages send on in the forward
    of a ``watched`` job is kept.
    """

    step: int
    seed: int
    batch: Batch
    programs: tuple[Program, ...]
    order: Order
    weights: tuple[float, ...]
    loss_fn: LossFn | None
    loss_scale: float = 1.0
    pending_steps: tuple[int, ...] = ()
    settings: Snapshot | None = None
    train: bool = True
    synchronised: bool = True
    wants_loss: bool = True
    wants_outputs: bool = False
    trial: bool = False
    others_assume: bool = False
    watched: bool = False

    @property
    def assumes(self) -> bool:
        """Whether a recording follows answers that may turn out wrong, here or in another pipeline."""
        return self.others_assume or any(program.captured.assumed for program in self.programs)

    def randomness(self, microbatch: int, *, held: bool = False) -> AbstractContextManager[None]:
        """The keyed randomness of a micro-batch, given its place in the batch; ``held`` as in :func:`microbatch_randomness`."""
        return microbatch_randomness(self.seed, self.step, self.batch.microbatches[microbatch].number, held=held)


@dataclass(frozen=True, slots=True)
class Broken:
    """An error that counts only if all micro-batches were on the right path."""

    cause: Cause
    error: Exception


@dataclass(slots=True)
class Result:
    """What one rank brings back: losses and outputs of the micro-batches whose last stage it ran, and the timed actions.

    ``answers`` are the true ones where a stage found an assumption wrong, by micro-batch and ordinal; ``broken`` the errors in
    micro-batches with assumptions, by micro-batch and stage; ``crossings`` what stages of a watched job sent on, by stage and
    micro-batch.
    """

    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    answers: dict[int, dict[int, Answer]] = field(default_factory=dict)
    broken: dict[tuple[int, int], Broken] = field(default_factory=dict)
    crossings: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
