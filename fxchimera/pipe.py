"""The wrapped model: every call of the user's becomes a job that is the same on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera.planner.table import Plan, costs_of
from fxchimera.runtime.agreement import Call, agree, agree_on_batch
from fxchimera.runtime.engine import Engine, Orders
from fxchimera.runtime.executor import Job
from fxchimera.runtime.loss import LossFn, LossWeight, weights_of
from fxchimera.runtime.losscheck import check_loss
from fxchimera.runtime.microbatch import Batch, ChunkSpecs, describe_batch, digest, divide, merge
from fxchimera.runtime.norms import clip_gradients
from fxchimera.runtime.program import Program, Programs
from fxchimera.runtime.reference import run_reference
from fxchimera.runtime.results import gather_loss, gather_outputs, gather_timeline
from fxchimera.runtime.state import gather_state, load_state, owned_state, owner_process
from fxchimera.runtime.verify import Verification, compare, plain_copy
from fxchimera.runtime.world import World
from fxchimera.schedule.order import Order
from fxchimera.schedule.simulate import simulate
from fxchimera.schedule.timeline import Timeline
from fxchimera.view.drawing import Drawing

__all__ = ["Pipeline"]


class Pipeline:
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
        loss_fn: LossFn | None,
        loss_weight: LossWeight,
        specs: ChunkSpecs,
        seed: int,
    ) -> None:
        first: Program = programs.first
        self.plan = Plan(first.plan, order.placement, order.name, first.captured.report)
        self._model, self._programs, self._world, self._specs, self._seed = model, programs, world, specs, seed
        self._loss_fn, self._loss_weight = loss_fn, loss_weight
        self._names = first.captured.parameters
        self._costs = costs_of(first.plan.stages)
        sizes = {name: model.get_parameter(aliases[0]).nbytes for name, aliases in self._names.items()}
        self._orders = Orders.of(order, first.plan, self._costs, sizes)
        agree(world, "plan", repr(first.plan) + self._orders.step.digest() + repr(sizes))
        self._owner = owner_process(model, first.plan, self._names)
        self._engine = Engine(model, first, self._orders, world)
        self._step = 0
        self._pending: tuple[int, ...] = ()
        self._synchronise = True
        self._timeline: Timeline | None = None
        self._loss_checked: set[tuple[Program, str]] = set()

    # ------------------------------------------------------------------ running

    def step(self, *args: Any, target: Any = None, loss_scale: float | torch.Tensor = 1.0, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward of one batch and bring the gradients to their owners.

        Afterwards every owned parameter's ``.grad`` has grown by the batch's gradient times ``loss_scale``.  Returns the batch's
        loss (detached, unscaled), the same on every rank.

        Raises:
            BatchError: The batch cannot be divided, or differs between ranks; nothing has been sent.
            PipelineError: A rank failed; the message names rank, stage, direction, micro-batch, action and the first cause.
        """
        if not torch.is_grad_enabled():
            raise FxChimeraError("step() was called under torch.no_grad(); call pipe(...) or pipe.evaluate(...) for forward only")
        order = self._orders.step if self._synchronise else self._orders.unsynchronised
        job = self._prepare(
            Call.STEP,
            args,
            kwargs,
            target,
            order=order,
            loss_scale=float(loss_scale),
            synchronised=self._synchronise,
            wants_loss=True,
        )
        loss = self._train(job)
        self._pending = () if self._synchronise else job.pending_steps
        self._step += 1
        return loss

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward only, without gradients, in the model's current mode; returns the merged output on every rank."""
        with torch.no_grad():
            job = self._prepare(Call.FORWARD, args, kwargs, None, order=self._orders.forward, train=False, wants_outputs=True)
            results, _ = self._engine.run(job)
            self._engine.share_statistics()
            outputs = gather_outputs(self._world, results)
        return merge(outputs, [microbatch.rows for microbatch in job.batch.microbatches])

    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """Return the loss of one batch in evaluation mode, without gradients; every module's mode is as before afterwards."""
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            with torch.no_grad():
                order = self._orders.forward
                job = self._prepare(Call.EVALUATE, args, kwargs, target, order=order, train=False, wants_loss=True)
                results, _ = self._engine.run(job)
                return gather_loss(self._world, results, job.weights)
        finally:
            for module, training in modes:
                module.training = training

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

        They are added to the owners' ``.grad`` by the first step outside.
        """
        before = self._synchronise
        self._synchronise = False
        try:
            yield
        finally:
            self._synchronise = before

    # ------------------------------------------------------------------ parameters and state

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
        """Clip by the norm of all gradients of the model, each parameter counted once; returns that norm, the same everywhere."""
        return clip_gradients(self._engine.owned, list(self._names), self._world, max_norm, norm_type)

    def state_dict(self, *, full: bool = True) -> dict[str, Any]:
        """Return the model's state under its own names: all of it, on the CPU, on rank 0 ({} elsewhere).

        With ``full=False`` every process returns the entries that it owns, without copying.
        """
        if full:
            return gather_state(self._model, self._owner, self._world)
        return owned_state(self._model, self._owner, self._world)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load a full state dict under the model's own names; under torchrun rank 0's counts."""
        load_state(self._model, state_dict, self._owner, self._world, strict=strict)

    # ------------------------------------------------------------------ looking

    def draw(self) -> Drawing:
        """Draw the predicted step and, once a step has run, the measured one below it; prints as text, renders in a notebook."""
        return Drawing(self._timelines())

    def trace(self, path: str | Path) -> None:
        """Write the predicted and measured steps as Chrome JSON for Perfetto (rank 0 writes)."""
        text = Drawing(self._timelines()).to_chrome()
        if self._world.process == 0:
            Path(path).write_text(text)

    def verify(self, *args: Any, target: Any = None, **kwargs: Any) -> Verification:
        """Run one batch through the pipeline and through the plain model and compare loss and every gradient.

        Gradients, buffers and the step count are as before afterwards.  Needs a host that holds the whole model.
        """
        if self._pending:
            raise FxChimeraError("verify() cannot run between a step under no_sync() and the step that exchanges its gradients")
        state = self.state_dict()
        grads = {name: parameter.grad for name, parameter in self.named_parameters()}
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        job = self._prepare(Call.STEP, args, kwargs, target, order=self._orders.step, wants_loss=True)
        try:
            for parameter in self.parameters():
                parameter.grad = None
            loss = self._train(job)
            own = {name: parameter.grad for name, parameter in self.named_parameters()}
        finally:
            for name, parameter in self.named_parameters():
                parameter.grad = grads[name]
            for buffer, value in buffers:
                buffer.data.copy_(value)
        return self._compare(job, state, loss, own)

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """End threads, connections and the process group if this object made it; may be called more than once."""
        self._engine.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ details

    def _prepare(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        *,
        order: Order,
        loss_scale: float = 1.0,
        synchronised: bool = True,
        train: bool = True,
        wants_loss: bool = False,
        wants_outputs: bool = False,
    ) -> Job:
        """Divide and check the batch on every rank, agree on it, and make the job."""

        def make() -> tuple[Job, int, str]:
            batch = divide(args, kwargs, target, order.placement.n_microbatches, self._specs)
            programs = tuple(self._programs.find(microbatch) for microbatch in batch.microbatches)
            if wants_loss:
                self._check_loss(programs, batch)
            job = Job(
                step=self._step,
                seed=self._seed,
                batch=batch,
                programs=programs,
                order=order,
                weights=weights_of(batch, self._loss_weight, self._loss_fn, programs) if wants_loss else (),
                loss_fn=self._loss_fn,
                loss_scale=loss_scale,
                pending_steps=(*self._pending, self._step),
                train=train,
                synchronised=synchronised,
                wants_loss=wants_loss,
                wants_outputs=wants_outputs,
            )
            return job, digest(batch), describe_batch(batch)

        self._world.failure.check()
        if self._engine.closed:
            raise FxChimeraError("this pipeline has been closed; wrap the model again to go on")
        return agree_on_batch(self._world, call, make)

    def _check_loss(self, programs: Sequence[Program], batch: Batch) -> None:
        for program, microbatch in zip(programs, batch.microbatches, strict=True):
            key = (program, describe_batch(Batch((microbatch,), microbatch.rows)))
            if key not in self._loss_checked:
                check_loss(program.captured, microbatch.target, self._loss_fn)
                self._loss_checked.add(key)

    def _train(self, job: Job) -> torch.Tensor:
        """Run a step; gradients change only when every rank has come to its end."""
        try:
            results, self._timeline = self._engine.run(job)
            loss = gather_loss(self._world, results, job.weights)
        except BaseException:
            self._engine.abandon()
            raise
        self._engine.commit(job)
        return loss

    def _timelines(self) -> tuple[Timeline, ...]:
        predicted = simulate(self._orders.step, self._costs)
        measured_ones = gather_timeline(self._world, self._timeline)
        return (predicted,) if measured_ones is None else (predicted, measured_ones)

    def _compare(self, job: Job, state: dict[str, Any], loss: torch.Tensor, own: dict[str, torch.Tensor | None]) -> Verification:
        gathered = self._world.collect(own)
        result: Verification | None = None
        if self._world.process == 0:
            plain = plain_copy(self._model, self._names, state)
            expected = run_reference(
                plain,
                job.batch,
                job.programs,
                job.order.placement,
                weights=job.weights,
                loss_fn=job.loss_fn,
                seed=job.seed,
                step=job.step,
            )
            found = {name: gradient for part in gathered for name, gradient in part.items()}
            result = compare(job.programs[0].plan, found, expected.gradients, loss, expected.loss)
        answer: Verification = self._world.spread(result)
        return answer
