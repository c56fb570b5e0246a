"""An error on a path that should not have been taken: the run goes on with blanks, and is undone when it has ended.

    if smallest_eigenvalue(y) > 0: root = cholesky(y)          recorded as True; for this batch it is False, and cholesky raises

Whether a path is wrong is known only when the ranks have ended, because the check may run on another one.  So an error in a
micro-batch with assumed answers is noted, and its stage sends zeros on and no gradients back.  It counts only when no answer was
wrong, of any micro-batch, for one that left the path may have left its mark in a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fxchimera.errors import PipelineError
from fxchimera.runtime.devices.lanes import Lane
from fxchimera.runtime.failures.failure import Cause
from fxchimera.runtime.message import Payload
from fxchimera.runtime.steps.job import Broken, Job, Result
from fxchimera.runtime.steps.script import Cue, Message
from fxchimera.schedule.action import Kind
from fxchimera_passes.assumed import collecting

__all__ = ["WrongPaths"]


class WrongPaths:
    """What one rank does about errors in micro-batches whose answers were assumed."""

    def __init__(self, rank: int, job: Job, result: Result, lane: Lane | None = None) -> None:
        self._rank, self._job, self._result = rank, job, result
        self._device = None if lane is None else lane.device

    @contextmanager
    def noticing(self, cue: Cue) -> Iterator[None]:
        """Keep the true answers of assumptions that a forward finds wrong, also when it fails afterwards."""
        if cue.action.kind is not Kind.F:
            yield
            return
        with collecting() as answers:
            try:
                yield
            finally:
                if answers:
                    self._result.answers.setdefault(cue.microbatch, {}).update(answers)

    def attempt(self, cue: Cue, compute: Callable[[Cue], None], take: Callable[[Message], object]) -> bool:
        """Do ``compute(cue)``; False where it fails, or its stage has failed in this micro-batch before.

        Args:
            cue: A computation of a micro-batch with assumed answers.
            compute: Does it.
            take: Takes a message off its channel, which must not be left there.

        Raises:
            PipelineError: Another rank has failed.
        """
        place = (cue.microbatch, cue.action.stage)
        if place in self._result.broken:
            if cue.reads is not None:
                take(cue.reads)
            return False
        try:
            compute(cue)
        except PipelineError:
            raise
        except Exception as error:
            text = f"{cue.position.on_rank()}: {type(error).__name__}: {error}"
            self._result.broken[place] = Broken(Cause(self._rank, text), error)
            return False
        return True

    def blanks(self, cue: Cue) -> Payload:
        """What the neighbouring stage gets instead of the result of ``cue``: zeros for activations, no gradients."""
        program, stage = cue.program, cue.action.stage
        assert program is not None
        if cue.action.kind is Kind.F:
            device = self._device or program.captured.device
            return [torch.zeros(meta.shape, dtype=meta.dtype, device=device) for meta in program.forward_metas(stage + 1)]
        return [None] * len(program.backward_metas(stage - 1))
