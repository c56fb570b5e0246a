"""What a pipeline shows of itself: pictures of its steps, measurements, and a comparison with the plain model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fxchimera.pipestate import StatefulPipeline
from fxchimera.planner.measured import measured_plan
from fxchimera.planner.profile import Profile
from fxchimera.planner.table import Plan
from fxchimera.runtime.checks.plainrun import Passed, refuse_other_draws
from fxchimera.runtime.checks.profile import agree_on_rounds, profile_pipeline
from fxchimera.runtime.checks.verdict import Verification
from fxchimera.runtime.checks.verify import compare_with_plain
from fxchimera.runtime.processes.agreement import Call
from fxchimera.runtime.steps.attempts import Attempts
from fxchimera.runtime.steps.engine import Orders
from fxchimera.runtime.steps.results import gather_timeline
from fxchimera.runtime.steps.trial import run_trial
from fxchimera.schedule.profile import Costs
from fxchimera.schedule.simulate import simulate
from fxchimera.schedule.timeline import Timeline
from fxchimera.view.drawing import Drawing

__all__ = ["ObservedPipeline"]


class ObservedPipeline(StatefulPipeline):
    """The part of a :class:`Pipeline` that looks at it."""

    plan: Plan
    _names: Mapping[str, tuple[str, ...]]
    _attempts: Attempts
    _orders: Orders
    _costs: Costs
    _timeline: Timeline | None

    def _trying(self, what: str) -> AbstractContextManager[None]:
        raise AssertionError("the pipeline has one")

    def draw(self) -> Drawing:
        """Draw the predicted step and, once a step has run, the measured one with it; prints as text, renders in a notebook."""
        timelines = self._timelines()
        return Drawing(timelines, paired=len(timelines) == 2)

    def trace(self, path: str | Path) -> None:
        """Write the predicted and measured steps as Chrome JSON for Perfetto (rank 0 writes)."""
        text = self.draw().to_chrome()
        if self._world.process == 0:
            Path(path).write_text(text)

    def verify(self, *args: Any, target: Any = None, **kwargs: Any) -> Verification:
        """Run one batch through the pipeline and through the plain model and compare all that a step makes.

        That is the loss, every micro-batch's loss and outputs, every gradient, the buffers after the step, and the copies of
        parameters.  The result is true when all agree; it prints as a summary that names the first stage that differs, and has
        a row for everything (``table()``, ``to_csv()``, ``rows``).  Gradients, buffers, attributes, modes, generators and the
        step count are as before afterwards; the user's hooks on parameters are not called.  Rank 0 needs host memory for the
        whole model.

        Args:
            args: The batch, as :meth:`step` gets it.
            target: Its target.
            kwargs: The batch's keyword arguments.

        Raises:
            FxChimeraError: The call is made under ``no_sync`` or ``torch.no_grad()``, ``parallelize`` has changed stages, compiled
                stages draw at random, or rank 0 cannot run the plain model.
            PipelineError: A rank failed.
        """
        with self._trying("verify()"):
            state = self.state_dict()
            job = self._preparation.job(Call.STEP, args, kwargs, target, order=self._orders.step, steps=(self._step,))
            refuse_other_draws(job)
            trial = run_trial(self._model, self._engine, self._attempts, job, watched=self._owner)
            self._timeline = trial.finished.timeline
            return compare_with_plain(self._engine, self._model, self._names, trial, state, Passed(args, kwargs, target))

    def profile(self, *args: Any, target: Any = None, rounds: int = 5, **kwargs: Any) -> Profile:
        """Measure on one batch how long F, B, I and W of every stage take, messages between neighbours, and a whole step.

        ``plan`` then has the measured seconds, and :meth:`draw` predicts from them.  A stage is timed while the other ranks are
        idle.  The model is as before afterwards; forward hooks and ``loss_fn`` are called about ``4 * rounds`` times.

        Args:
            args: The batch, as :meth:`step` gets it.
            target: Its target.
            rounds: Rounds to take medians of, after one that is not counted.
            kwargs: The batch's keyword arguments.

        Raises:
            FxChimeraError: The call is made under ``no_sync`` or ``torch.no_grad()``, or parameters are on the meta device.
        """
        with self._trying("profile()"):
            agree_on_rounds(self._world, list(self._engine.owned.items()), rounds)
            job = self._preparation.job(Call.STEP, args, kwargs, target, order=self._orders.step, steps=(self._step,))
            found = profile_pipeline(self._model, self._engine, self._attempts, self._world, job, rounds=rounds)
            threads = self._world.num_processes == 1
            self.plan = measured_plan(self.plan, found.measurement, shared=threads)
            self._costs, self._timeline = self.plan.costs, found.timeline
        predicted = simulate(self._orders.step, self._costs).makespan
        return Profile.of(found.measurement, self.plan, predicted, found.seconds, shared=threads)

    def _timelines(self) -> tuple[Timeline, ...]:
        predicted = simulate(self._orders.step, self._costs)
        measured_ones = gather_timeline(self._world, self._timeline)
        return (predicted,) if measured_ones is None else (predicted, measured_ones)
