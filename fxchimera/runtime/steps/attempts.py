"""Run a job until every answer that its recordings assume has turned out right.

    run --- all right --------------------------------> commit
     |
     +--- micro-batch 2: read 3 is False, not True ---> undo, record or find that path, run again under the same numbers

A recording has to assume what the forward reads of values that depend on parameters.  Its checks run in the stages; the first wrong
answer of each micro-batch is what every rank goes on with, so each run settles at least one more.  Gradients, statistics, buffers
and Python attributes are as before a run that was undone; its random draws are drawn again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.batches.homes import Homes
from fxchimera.runtime.batches.settling import MOST_RUNS, known_paths, unsettled
from fxchimera.runtime.failures.failure import Cause
from fxchimera.runtime.processes.agreement import Call
from fxchimera.runtime.processes.world import World
from fxchimera.runtime.stages.program import Programs
from fxchimera.runtime.steps.engine import Engine
from fxchimera.runtime.steps.job import Job, Result
from fxchimera.runtime.steps.nonfinite import NanPolicy, not_finite
from fxchimera.runtime.steps.preparation import Preparation
from fxchimera.runtime.steps.results import Verdict, gather_answers, gather_failure, gather_losses
from fxchimera.runtime.undo import undo_of
from fxchimera.schedule.timeline import Timeline
from fxchimera_passes.captured import info

__all__ = ["Attempts", "Finished"]


@dataclass(frozen=True, slots=True)
class Finished:
    """A job as it was run in the end, and what it brought on this process's ranks."""

    job: Job
    results: list[Result]
    timeline: Timeline


class Attempts:
    """Runs jobs; ``repeated`` counts the runs that were undone because an answer was wrong."""

    def __init__(
        self, model: nn.Module, programs: Programs, preparation: Preparation, engine: Engine, world: World, homes: Homes
    ) -> None:
        self._model, self._programs, self._preparation, self._engine = model, programs, preparation, engine
        self._world, self._homes = world, homes
        self.repeated = 0

    def run(self, call: Call, job: Job) -> Finished:
        """Collective: run a job, as often as it takes.

        Raises:
            PipelineError: A rank failed.
            FxChimeraError: Answers were still wrong after ``MOST_RUNS`` runs, a path cannot be recorded, or a buffer has no one
                stage (see :class:`Homes`); nothing was changed.
        """
        for _ in range(MOST_RUNS):
            undo = self._remember(job) if job.assumes else None
            if undo is None:
                self._homes.check(job.programs)
            try:
                results, timeline = self._engine.run(job)
                verdict = self._judge(job, results) if undo is not None else None
            except BaseException:
                if job.train:
                    self._engine.abandon()
                raise
            if verdict is None or verdict.settled:
                if undo is not None:
                    self._settle(job, undo)
                self._programs.succeeded()
                return Finished(job, results, timeline)
            assert undo is not None
            undo()
            self.repeated += 1
            latest = [job.programs[m].captured.assumed[ordinal] for m, (ordinal, _) in sorted(verdict.wrong.items())]
            job = self._preparation.repeat(call, job, known_paths(job.programs, verdict.wrong))
        raise unsettled(latest[0] if latest else None)

    def train(self, call: Call, job: Job, *, hooks: bool = True, nan: NanPolicy = "ignore") -> tuple[Finished, torch.Tensor]:
        """Collective: run a step and return its loss; gradients change only when every rank has come to its end.

        Raises:
            NonFiniteLossError: The loss is nan or infinite, and ``nan`` is "raise"; with "skip", the step leaves no trace.
            FxChimeraError: As :meth:`run`.
        """
        job = replace(job, trial=True) if nan == "skip" else job
        undo = self._remember(job) if nan == "skip" else self._engine.abandon
        finished = self.run(call, job)
        try:
            losses = gather_losses(self._world, finished.results, finished.job.weights)
        except BaseException:
            self._engine.abandon()
            raise
        if nan != "ignore" and (error := not_finite(losses, job.step, self._engine.placement)) is not None:
            undo()
            if nan == "raise":
                raise error
            return finished, losses.total
        try:
            self._engine.commit(finished.job, hooks=hooks)
        except Exception as error:  # a hook of the user's, when other ranks are past it
            text = f"after the step, in a hook on a parameter: {type(error).__name__}: {error}"
            raise self._world.failure.report(Cause(self._world.process, text)).error() from error
        return finished, losses.total

    def _settle(self, job: Job, undo: Callable[[], None]) -> None:
        """All answers were right, so these are the recordings to look at."""
        try:
            self._homes.check(job.programs)
        except FxChimeraError:
            undo()
            raise

    def _judge(self, job: Job, results: list[Result]) -> Verdict:
        verdict = gather_answers(self._world, results, len(job.programs))
        if verdict.failed:
            raise gather_failure(self._world, results, verdict.broken)
        return verdict

    def _remember(self, job: Job) -> Callable[[], None]:
        """Note everything that a run of ``job`` changes; the function returned puts it back."""
        graphs = [program.captured.graph for program in job.programs]
        names = sorted({name for graph in graphs for node in graph.nodes for name in info(node).writes})
        restore = undo_of(self._model, map(self._model.get_buffer, names))
        self._engine.remember()

        def undo() -> None:
            self._engine.retract()
            restore()

        return undo
