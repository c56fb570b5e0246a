"""The wrapped model: every call of the user's becomes a job that is the same on every rank."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fxchimera.errors import FxChimeraError, PipelineError
from fxchimera.pipelook import ObservedPipeline
from fxchimera.planner.table import Plan
from fxchimera.runtime.batches.homes import Homes
from fxchimera.runtime.batches.loss import LossFn, LossWeight
from fxchimera.runtime.batches.warmup import in_mode
from fxchimera.runtime.failures.failure import Cause
from fxchimera.runtime.failures.report import write_report
from fxchimera.runtime.failures.tracebacks import shorten
from fxchimera.runtime.microbatch import ChunkSpecs, merge
from fxchimera.runtime.processes.agreement import Call, agree
from fxchimera.runtime.processes.dataparallel import DataParallel
from fxchimera.runtime.processes.world import World
from fxchimera.runtime.stages.batchnorm import BatchNorm
from fxchimera.runtime.stages.program import Program, Programs
from fxchimera.runtime.steps.attempts import Attempts
from fxchimera.runtime.steps.engine import Engine, Orders
from fxchimera.runtime.steps.nonfinite import NanPolicy
from fxchimera.runtime.steps.norms import clip_gradients
from fxchimera.runtime.steps.preparation import Preparation
from fxchimera.runtime.steps.results import gather_losses, gather_outputs
from fxchimera.runtime.weights.state import owner_process
from fxchimera.schedule.order import Order
from fxchimera.schedule.timeline import Timeline

__all__ = ["Pipeline"]

_HELPERS = ("_alone", "_trying")


class Pipeline(ObservedPipeline, DataParallel):
    """A model that trains on several ranks; made by :func:`pipeline`.  Not an ``nn.Module``.

    Every method is called on every rank, with the same arguments.  After a rank has failed, the object refuses further work.
    """

    def __init__(
        self,
        model: nn.Module,
        programs: Programs,
        order: Order,
        world: World,
        *,
        plan: Plan,
        loss_fn: LossFn | None,
        loss_weight: LossWeight,
        specs: ChunkSpecs,
        seed: int,
        nan: NanPolicy = "raise",
        batch_norm: BatchNorm = "each",
    ) -> None:
        first: Program = programs.first
        self.plan = plan
        self._model, self._world = model, world
        self._names = first.captured.parameters
        self._costs = plan.costs
        sizes = {name: model.get_parameter(aliases[0]).nbytes for name, aliases in self._names.items()}
        self._orders = Orders.of(order, first.plan, self._costs, sizes)
        step = self._orders.step
        said = f"schedule {step.name}, {order.placement.n_microbatches} micro-batches, nan={nan}, batch_norm={batch_norm}"
        agree(world, "plan", "\n".join([said, repr(sizes), repr(first.plan), step.to_csv(), step.digest()]))
        self._owner = owner_process(model, first.plan, self._names, order.placement)
        self._engine = Engine(model, first, self._orders, world, deferred=batch_norm == "deferred")
        for executor in self._engine.executors:
            executor.memory = plan.memory[executor.rank].words()
        self._preparation = Preparation(
            model, programs, self._engine, world, loss_fn=loss_fn, loss_weight=loss_weight, specs=specs, seed=seed
        )
        homes = Homes(self._owner, first, order.placement.pipes[0], processes=world.num_processes > 1)
        self._attempts = Attempts(model, programs, self._preparation, self._engine, world, homes)
        self._nan: NanPolicy = nan
        self._in_use = threading.Lock()
        self._step = 0
        self._pending: tuple[int, ...] = ()
        self._synchronise = True
        self._timeline: Timeline | None = None

    # ------------------------------------------------------------------ running

    def step(self, *args: Any, target: Any = None, loss_scale: float | torch.Tensor = 1.0, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward of one batch and bring the gradients to their owners.

        Afterwards every owned parameter's ``.grad`` has grown by the batch's gradient times ``loss_scale`` (from a gradient scaler:
        ``scaler.scale(torch.ones(()))``).  Returns the batch's loss (detached, unscaled), the same on every rank.  Where the model
        branches on values that depend on parameters, the step may have to be run again: forward hooks and ``loss_fn`` are then
        called again, too.

        Raises:
            BatchError: The batch cannot be divided, or differs between ranks; nothing has been sent.
            NonFiniteLossError: The loss is nan or infinite; gradients are as before the step, and the next step may be run.
            PipelineError: A rank failed; the message names rank, stage, direction, micro-batch, action and the first cause.
        """
        if not torch.is_grad_enabled():
            raise FxChimeraError("step() was called under torch.no_grad(); call pipe(...) or pipe.evaluate(...) for forward only")
        call = Call.STEP if self._synchronise else Call.UNSYNCHRONISED_STEP
        order = self._orders.step if self._synchronise else self._orders.unsynchronised
        with self._alone():
            steps = (*self._pending, self._step)
            job = self._preparation.job(call, args, kwargs, target, order=order, steps=steps, loss_scale=loss_scale)
            finished, loss = self._attempts.train(call, job, nan=self._nan)
            self._timeline = finished.timeline
            self._pending = () if self._synchronise else steps
            self._step += 1
        return loss

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward only, without gradients, in the model's current mode; returns the merged output on every rank."""
        with self._alone(), torch.no_grad():
            job = self._preparation.job(Call.FORWARD, args, kwargs, None, order=self._orders.forward, steps=(self._step,))
            finished = self._attempts.run(Call.FORWARD, job)
            self._engine.share_statistics()
            outputs = gather_outputs(self._world, finished.results, job.batch)
        return merge(outputs, [microbatch.rows for microbatch in job.batch.microbatches])

    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """Return the loss of one batch in evaluation mode, without gradients; every module's mode is as before afterwards."""
        with self._alone(), torch.no_grad(), in_mode(self._model, training=False):
            job = self._preparation.job(Call.EVALUATE, args, kwargs, target, order=self._orders.forward, steps=(self._step,))
            finished = self._attempts.run(Call.EVALUATE, job)
            return gather_losses(self._world, finished.results, finished.job.weights).total

    def warmup(
        self, *signatures: Any, training: bool = True, evaluation: bool = True, steps: int = 1, lend_parameters: bool = False
    ) -> int:
        """Record the model in advance for calls to come; returns how many recordings were made.  Modes are as before afterwards.

        Args:
            signatures: What calls will get, a last smaller batch too: each a tuple of args, a dict of kwargs, a pair of both, or
                one tensor.  Meta tensors will do where the model does not read their values into Python.
            training: Record for :meth:`step`.
            evaluation: Record for :meth:`evaluate`, and for calls in evaluation mode.
            steps: For how many steps, where random draws decide the path through the model.
            lend_parameters: Under torchrun, give every rank the values of all parameters meanwhile (host memory for the whole
                model); only for a model that cannot be recorded without them, which the error of a step then says.
        """
        modes, numbers = [True] * training + [False] * evaluation, range(self._step, self._step + steps)
        with self._alone():
            return self._preparation.warmup(
                signatures, order=self._orders.step, modes=modes, steps=numbers, lend_parameters=lend_parameters
            )

    def train(self, mode: bool = True) -> Pipeline:
        """Set training mode, as on ``nn.Module``."""
        self._model.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Set evaluation mode, as on ``nn.Module``."""
        return self.train(False)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Promise, on every rank, that the gradients of the steps inside may stay where they are.

        They are added to the owners' ``.grad`` by the first step outside; until then ``.grad`` is as it was.

        Raises:
            FxChimeraError: The pipeline was made with ``nan="skip"``: one step of several could not be taken back.
        """
        if self._nan == "skip":
            raise FxChimeraError(
                'no_sync() on a pipeline with nan="skip": of steps whose gradients are exchanged together, a single one could not '
                'be skipped; use nan="raise", or leave no_sync() out'
            )
        before = self._synchronise
        self._synchronise = False
        try:
            yield
        finally:
            self._synchronise = before

    # ------------------------------------------------------------------ parameters

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that this process owns, under the model's own names and in its order."""
        for name in self._names:
            if name in self._engine.owned:
                yield name, self._engine.owned[name]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that this process owns; each parameter is on exactly one rank."""
        for _, parameter in self.named_parameters():
            yield parameter

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip by the norm of all gradients of the model, each parameter counted once; returns that norm, the same everywhere.

        Raises:
            FxChimeraError: Steps under ``no_sync`` have left gradients that are not at their owners yet.
        """
        if self._pending:
            raise FxChimeraError(
                f"clip_grad_norm_ was called after {len(self._pending)} steps under no_sync(), whose gradients are not in .grad "
                "yet; clip after the step that exchanges them"
            )
        dtypes = {name: self._model.get_parameter(aliases[0]).dtype for name, aliases in self._names.items()}
        return clip_gradients(self._engine.owned, dtypes, self._world, max_norm, norm_type)

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """End threads, connections and the process group if this object made it; may be called more than once."""
        self._engine.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:  # the other ranks need not wait for this one
            self._world.failure.report(Cause(self._world.process, f"the caller left the pipeline: {type(error).__name__}: {error}"))
        self.close()

    # ------------------------------------------------------------------ details

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Let one thread at a time use the ranks; another is refused, because waiting could mean for ever."""
        if not self._in_use.acquire(blocking=False):
            raise FxChimeraError(
                f"the pipeline is at work for another call (from another thread than {threading.current_thread().name!r}, or this "
                "one comes from a hook or loss_fn of the model); make one call at a time"
            )
        try:
            yield
        except PipelineError as error:
            if (path := write_report(error, self._engine.recent)) is not None:
                error.add_note(f"What this process did last: {path}")
            shorten(error, _HELPERS)
            raise
        except KeyboardInterrupt as error:
            shorten(error, _HELPERS)
            raise
        finally:
            self._in_use.release()

    @contextlib.contextmanager
    def _trying(self, what: str) -> Iterator[None]:
        """Run steps that leave no trace inside; ``what`` is the call, for the error."""
        if not self._synchronise or self._pending:
            raise FxChimeraError(
                f"{what} cannot run under no_sync(), or before the step that exchanges the gradients left by it "
                f"({len(self._pending)} steps left some); call it after that step"
            )
        if not torch.is_grad_enabled():
            raise FxChimeraError(f"{what} runs backwards, but was called under torch.no_grad()")
        with self._alone():
            self._world.failure.calm = True  # ranks wait while one measures, or runs the plain model
            try:
                yield
            finally:
                self._world.failure.calm = False
