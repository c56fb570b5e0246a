"""A step that leaves no trace: gradients, buffers, Python attributes and the count of steps are as before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.processes.agreement import Call
from fxchimera.runtime.steps.attempts import Attempts, Finished
from fxchimera.runtime.steps.engine import Engine
from fxchimera.runtime.steps.job import Job
from fxchimera.runtime.undo import undo_of

__all__ = ["Trial", "run_trial"]


@dataclass(frozen=True, slots=True)
class Trial:
    """What a step brought: the job as it was run in the end, its loss, and the gradients that this process owns.

    ``buffers`` are the values after the step of those that this process owns, if asked for.
    """

    finished: Finished
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


def run_trial(model: nn.Module, engine: Engine, attempts: Attempts, job: Job, *, watched: Mapping[str, int] | None = None) -> Trial:
    """Collective: run a step and undo it; the user's hooks on parameters are not called.

    With ``watched``, the rank of every buffer by name, what stages send on and what is in buffers afterwards is kept.

    Raises:
        FxChimeraError: The user has parallelized stages; and as :meth:`Attempts.train`.
    """
    if any(program.shells for program in job.programs):
        raise FxChimeraError("verify() and profile() need the model as it was, but parallelize has changed its stages")
    owned = engine.owned
    earlier = {name: parameter.grad for name, parameter in owned.items()}
    undo = undo_of(model, model.buffers())
    try:
        for parameter in owned.values():
            parameter.grad = None
        finished, loss = attempts.train(Call.STEP, replace(job, trial=True, watched=watched is not None), hooks=False)
        engine.undo_trial()
        buffers = {
            name: buffer.detach().clone()
            for name, buffer in model.named_buffers(remove_duplicate=False)
            if watched is not None and watched.get(name, 0) in engine.world.ranks
        }
        return Trial(finished, loss, {name: parameter.grad for name, parameter in owned.items()}, buffers)
    finally:
        for name, parameter in owned.items():
            parameter.grad = earlier[name]
        undo()
