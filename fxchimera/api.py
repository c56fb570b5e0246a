"""The one line: ``fxchimera.pipeline(model, ...)`` and the object it returns.

This file alone knows every part.  It plans (capture, cost, cut, order), hands the result to the engine, and turns each call of the
user's into a job that is the same on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera.planner.choose import choose_cut
from fxchimera.planner.table import Plan, costs_of
from fxchimera.runtime.agreement import agree, agree_on_batch
from fxchimera.runtime.engine import Engine, Orders
from fxchimera.runtime.executor import Job, Result
from fxchimera.runtime.failure import Limits
from fxchimera.runtime.loss import LossFn, LossWeight, weights_of
from fxchimera.runtime.losscheck import check_loss
from fxchimera.runtime.microbatch import Batch, ChunkSpecs, describe_batch, digest, divide, merge
from fxchimera.runtime.norms import clip_gradients
from fxchimera.runtime.program import Program, Programs
from fxchimera.runtime.reference import Reference, run_reference
from fxchimera.runtime.results import gather_loss, gather_outputs, gather_timeline
from fxchimera.runtime.state import gather_state, load_state, owned_state, owner_process
from fxchimera.runtime.verify import Verification, compare, plain_copy
from fxchimera.runtime.world import World, make_world
from fxchimera.schedule.families import make_order
from fxchimera.schedule.order import Order
from fxchimera.schedule.simulate import simulate
from fxchimera.schedule.timeline import Timeline
from fxchimera.view.drawing import Drawing
from fxchimera_passes.capture import capture
from fxchimera_passes.captured import Captured
from fxchimera_passes.cost import analytic, measured

__all__ = ["Pipeline", "pipeline", "reference"]

Schedule = str | Order | Callable[[int, int], Order]

_STEP, _FORWARD, _EVALUATE = range(3)


def pipeline(
    model: nn.Module,
    *,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFn | None = None,
    num_stages: int,
    n_microbatches: int,
    schedule: Schedule = "chimera",
    split_points: Sequence[str] = (),
    loss_weight: LossWeight = "samples",
    args_chunk_spec: Sequence[Any] | None = None,
    kwargs_chunk_spec: Mapping[str, Any] | None = None,
    target_chunk_spec: Any = 0,
    cost: Literal["analytic", "measured"] = "analytic",
    seed: int | None = None,
    wait_seconds: float = 600.0,
) -> Pipeline:
    """Wrap ``model`` so that it trains on ``num_stages`` ranks.

    The ranks are threads of this process, or, under torchrun (or with a process group already made), one process each.

    Args:
        model: Any ``nn.Module``, in training mode if it is to be trained.
        example_args: Positional arguments of one batch, as ``step`` will get it.
        example_kwargs: Keyword arguments of one batch.
        loss_fn: ``loss_fn(output, target)``, or ``loss_fn(output)`` when ``step`` gets no target; None when the model returns its loss.
        num_stages: Number of stages, and of ranks (D).
        n_microbatches: Number of micro-batches a batch is divided into (N), both directions together.
        schedule: "chimera" (even D), "1f1b", "gpipe", an :class:`Order`, or a callable ``(D, N) -> Order``.
        split_points: Qualified names of the modules that begin a new stage, instead of the automatic cut.
        loss_weight: How a micro-batch counts: "samples" (by rows), "sum" (the loss is a sum), an ignore_index (by targets that are
            not it), or a callable ``(target, args, kwargs) -> number``.
        args_chunk_spec: Batch dimension of each positional argument where it is not the first: torch's ``TensorChunkSpec``, an
            int, or None to give the whole tensor to every micro-batch.
        kwargs_chunk_spec: The same for keyword arguments, by name.
        target_chunk_spec: The same for the target.
        cost: "analytic" (flops and bytes; the same cut in every run) or "measured" (seconds on this machine, rank 0's).
        seed: Seed of the keyed randomness (dropout); default ``torch.initial_seed()`` of rank 0.
        wait_seconds: How long a rank waits for one message before it raises.

    Raises:
        CaptureError: The model cannot be recorded; the message names the user's file and line.
        PartitionError: The model cannot be cut into ``num_stages`` stages.
        ScheduleError: The schedule is unknown or does not fit D and N.
        FxChimeraError: The number of ranks is not ``num_stages``, or ranks disagree.
    """
    order = _order(schedule, num_stages, n_microbatches)
    world = make_world(order.placement.num_ranks, Limits(wait_seconds))
    try:
        specs = ChunkSpecs(args=args_chunk_spec, kwargs=kwargs_chunk_spec, target=target_chunk_spec)
        batch = divide(example_args, dict(example_kwargs or {}), None, n_microbatches, specs)
        programs = _plan(model, batch, order, split_points, cost, world)
        chosen_seed = world.gather_objects(torch.initial_seed() if seed is None else seed)[0]
        return Pipeline(
            model, programs, order, world, loss_fn=loss_fn, loss_weight=loss_weight, specs=specs, seed=chosen_seed
        )
    except BaseException:
        world.close()
        raise


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
            _STEP, args, kwargs, target, order=order, loss_scale=float(loss_scale), synchronised=self._synchronise, wants_loss=True
        )
        results = self._run(job)
        self._pending = () if self._synchronise else job.pending_steps
        self._step += 1
        return gather_loss(self._world, results, job.weights)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward only, without gradients, in the model's current mode; returns the merged output on every rank."""
        with torch.no_grad():
            job = self._prepare(_FORWARD, args, kwargs, None, order=self._orders.forward, train=False, wants_outputs=True)
            results = self._run(job)
            outputs = gather_outputs(self._world, results)
        return merge(outputs, [microbatch.rows for microbatch in job.batch.microbatches])

    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """Return the loss of one batch in evaluation mode, without gradients; every module's mode is as before afterwards."""
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            with torch.no_grad():
                order = self._orders.forward
                job = self._prepare(_EVALUATE, args, kwargs, target, order=order, train=False, wants_loss=True)
                return gather_loss(self._world, self._run(job), job.weights)
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
        """Return the model's state under its own names: all of it on rank 0's CPU ({} elsewhere), or with ``full=False`` the owned."""
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
        state = self.state_dict()
        grads = {name: parameter.grad for name, parameter in self.named_parameters()}
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        job = self._prepare(_STEP, args, kwargs, target, order=self._orders.step, wants_loss=True)
        try:
            for parameter in self.parameters():
                parameter.grad = None
            loss = gather_loss(self._world, self._run(job), job.weights)
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
        call: int,
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
                weights=weights_of(batch, self._loss_weight, self._loss_fn) if wants_loss else (),
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
        return agree_on_batch(self._world, call, make)

    def _check_loss(self, programs: Sequence[Program], batch: Batch) -> None:
        for program, microbatch in zip(programs, batch.microbatches, strict=True):
            key = (program, describe_batch(Batch((microbatch,), microbatch.rows)))
            if key not in self._loss_checked:
                check_loss(program.captured, microbatch.target, self._loss_fn)
                self._loss_checked.add(key)

    def _run(self, job: Job) -> list[Result]:
        results, timeline = self._engine.run(job)
        if job.train:
            self._timeline = timeline
        return results

    def _timelines(self) -> tuple[Timeline, ...]:
        predicted = simulate(self._orders.step, self._costs)
        measured_ones = gather_timeline(self._world, self._timeline)
        return (predicted,) if measured_ones is None else (predicted, measured_ones)

    def _compare(self, job: Job, state: dict[str, Any], loss: torch.Tensor, own: dict[str, torch.Tensor | None]) -> Verification:
        gathered = self._world.gather_objects(own)
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
        answer: Verification = self._world.gather_objects(result)[0]
        return answer


def reference(
    model: nn.Module,
    *args: Any,
    target: Any = None,
    loss_fn: LossFn | None = None,
    num_stages: int,
    n_microbatches: int,
    schedule: Schedule = "chimera",
    split_points: Sequence[str] = (),
    loss_weight: LossWeight = "samples",
    args_chunk_spec: Sequence[Any] | None = None,
    kwargs_chunk_spec: Mapping[str, Any] | None = None,
    target_chunk_spec: Any = 0,
    loss_scale: float = 1.0,
    seed: int | None = None,
    step: int = 0,
    **kwargs: Any,
) -> Reference:
    """Run the plain ``model`` in this process, micro-batch by micro-batch, as a pipeline's step number ``step`` would.

    The randomness is keyed as in the pipeline, and the gradient sums are associated as in the pipeline: per (stage, replica) over
    micro-batches ascending, then the uses of a tied parameter by stage ascending, then the replicas, down before up.  So the
    returned loss and gradients equal the pipeline's to the last bit.  The model's ``.grad`` stays as it is.
    """
    order = _order(schedule, num_stages, n_microbatches)
    specs = ChunkSpecs(args=args_chunk_spec, kwargs=kwargs_chunk_spec, target=target_chunk_spec)
    batch = divide(args, kwargs, target, n_microbatches, specs)
    programs = _plan(model, batch, order, split_points, "analytic", None)
    return run_reference(
        model,
        batch,
        [programs.find(microbatch) for microbatch in batch.microbatches],
        order.placement,
        weights=weights_of(batch, loss_weight, loss_fn),
        loss_fn=loss_fn,
        loss_scale=loss_scale,
        seed=torch.initial_seed() if seed is None else seed,
        step=step,
    )


def _order(schedule: Schedule, num_stages: int, n_microbatches: int) -> Order:
    if isinstance(schedule, str):
        return make_order(schedule, num_stages, n_microbatches)
    order = schedule if isinstance(schedule, Order) else schedule(num_stages, n_microbatches)
    found = (order.placement.num_stages, order.placement.n_microbatches)
    if found != (num_stages, n_microbatches):
        raise FxChimeraError(
            f"the order {order.name!r} is for (num_stages, n_microbatches) = {found}, but the pipeline has "
            f"{(num_stages, n_microbatches)}"
        )
    return order


def _plan(
    model: nn.Module, batch: Batch, order: Order, split_points: Sequence[str], cost: str, world: World | None
) -> Programs:
    """Record the first micro-batch and cut the recording; with measured costs every rank uses rank 0's."""
    example = batch.microbatches[0]
    captured: Captured = capture(model, example.args, example.kwargs, num_stages=order.placement.num_stages)
    if cost == "measured":
        costs = measured(captured, example.args, example.kwargs)
        costs = world.gather_objects(costs)[0] if world is not None else costs
    elif cost == "analytic":
        costs = analytic(captured)
    else:
        raise FxChimeraError(f'cost must be "analytic" or "measured", got {cost!r}')
    return Programs(captured, choose_cut(captured, costs, order, split_points), example)
