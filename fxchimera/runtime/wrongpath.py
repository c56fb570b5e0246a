"""An error on a path that should not have been taken: the run goes on with blanks, and is undone when it has ended.

    if smallest_eigenvalue(y) > 0: root = cholesky(y)          recorded as True; for this batch it is False, and cholesky raises

Whether a path is wrong is known only when the ranks have ended, because the check may run on another one.  So an error in a
micro-batch with assumed answers is noted, and its stage sends zeros on and no gradients back.  It counts only when no answer was
wrong, of any micro-batch, for one that left the path may have left its mark in a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from fxchimera.errors import PipelineError
from fxchimera.runtime.failure import Cause
from fxchimera.runtime.job import Broken, Job, Result
from fxchimera.runtime.message import Key, Payload
from fxchimera.runtime.position import Position
from fxchimera.schedule.action import Action, Kind
from fxchimera_passes.assumed import collecting

__all__ = ["WrongPaths"]


class WrongPaths:
    """What one rank does about errors in micro-batches whose answers were assumed."""

    def __init__(self, rank: int, job: Job, result: Result) -> None:
        self._rank, self._job, self._result = rank, job, result

    @contextmanager
    def noticing(self, microbatch: int) -> Iterator[None]:
        """Keep the true answers of assumptions that a forward finds wrong, also when it fails afterwards."""
        with collecting() as answers:
            try:
                yield
            finally:
                if answers:
                    self._result.answers.setdefault(microbatch, {}).update(answers)

    def attempt(
        self, action: Action, compute: Callable[[Action], None], take: Callable[[Action], object], position: Position
    ) -> bool:
        """Do ``compute(action)``; False where it fails, or its stage has failed in this micro-batch before.

        Args:
            action: A compute.
            compute: Does it.
            take: Takes a message off its channel, which must not be left there.
            position: Says where the action is, for the error.

        Raises:
            Exception: Nothing was assumed in this micro-batch, or another rank has failed.
        """
        microbatch, stage = action.microbatch, action.stage
        assert microbatch is not None
        program = self._job.programs[microbatch]
        if (microbatch, stage) in self._result.broken:
            if action.kind is not Kind.W and stage + 1 < len(program.plan.stages):
                take(Action(stage, Kind.RECV_B, microbatch))
            return False
        try:
            compute(action)
        except Exception as error:
            if isinstance(error, PipelineError) or not program.captured.assumed:
                raise
            text = f"{position.on_rank()}: {type(error).__name__}: {error}"
            self._result.broken[microbatch, stage] = Broken(Cause(self._rank, text), error)
            return False
        return True

    def blanks(self, action: Action) -> Mapping[Key, Payload]:
        """What the neighbouring stage gets instead of the result of ``action``."""
        microbatch, stage = action.microbatch, action.stage
        assert microbatch is not None
        program = self._job.programs[microbatch]
        if action.kind is Kind.F and stage + 1 < len(program.plan.stages):
            zeros = [torch.zeros(m.shape, dtype=m.dtype, device=program.captured.device) for m in program.forward_metas(stage + 1)]
            return {Key.of(Action(stage, Kind.SEND_F, microbatch)): [*zeros]}
        if action.kind in (Kind.B, Kind.I) and stage > 0:
            return {Key.of(Action(stage, Kind.SEND_B, microbatch)): [None] * len(program.backward_metas(stage - 1))}
        return {}
