"""From the arguments of a call to a job that every rank agrees on, before anything is sent."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxchimera.errors import BatchError, FxChimeraError
from fxchimera.runtime.batches.fingerprint import describe_batch, digest, sample
from fxchimera.runtime.batches.loss import LossFn, LossWeight, counts_of, scale_of, shares_of, weights_of
from fxchimera.runtime.batches.losscheck import check_loss, with_named_draws
from fxchimera.runtime.batches.rows import OutputRows
from fxchimera.runtime.batches.warmup import WarmupBatch, in_mode
from fxchimera.runtime.microbatch import Batch, ChunkSpecs, dimensions, divide
from fxchimera.runtime.processes.agreement import Call, Prepared, agree_on_batch
from fxchimera.runtime.processes.world import World
from fxchimera.runtime.stages.program import KEPT, Program, Programs
from fxchimera.runtime.steps.engine import Engine
from fxchimera.runtime.steps.job import Job
from fxchimera.schedule.order import Order
from fxchimera_passes.capture.paths import Path
from fxchimera_passes.captured import RandomKey

__all__ = ["Preparation"]


class Preparation:
    """Divides batches, finds their programs and weights, and makes jobs of them; ``seed`` is that of the keyed randomness."""

    def __init__(
        self,
        model: nn.Module,
        programs: Programs,
        engine: Engine,
        world: World,
        *,
        loss_fn: LossFn | None,
        loss_weight: LossWeight,
        specs: ChunkSpecs,
        seed: int,
    ) -> None:
        self._model, self._programs, self._engine, self._world = model, programs, engine, world
        self._loss_fn, self._loss_weight, self._specs, self.seed = loss_fn, loss_weight, specs, seed
        self._loss_draws: set[RandomKey] = set()
        self._loss_checked: weakref.WeakKeyDictionary[Program, set[Hashable]] = weakref.WeakKeyDictionary()
        self._outputs = OutputRows()
        self._cuts: weakref.WeakKeyDictionary[Program, int] = weakref.WeakKeyDictionary()
        self._mode_word, self._cut_word, self._trainable_word = _Word(), _Word(), _Word()

    def job(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        *,
        order: Order,
        steps: tuple[int, ...],
        loss_scale: float | torch.Tensor = 1.0,
    ) -> Job:
        """Collective: make the job of a call; ``steps`` are the numbers of the steps left unsynchronised and of the present one.

        Raises:
            FxChimeraError: The batch, the loss or the model is refused, here or on another rank, or the ranks differ.
        """

        def make() -> Prepared[Job]:
            self._engine.inspect()
            n, pipeline = order.placement.n_microbatches, self._world.grid.pipeline
            batch = divide(args, kwargs, target, n, self._specs, pipeline=pipeline)
            self._refuse_input_gradients(batch)
            programs = self._programs.find(batch, self._engine.accept, seed=self.seed, step=steps[-1])
            wants_loss = call is not Call.FORWARD
            if wants_loss:
                self._check_loss(programs, batch)
            elif n > 1:
                self._outputs.check(programs[0], batch.microbatches[0], dimensions(args, kwargs, self._specs))
            job = Job(
                step=steps[-1],
                seed=self.seed,
                batch=batch,
                programs=programs,
                order=order,
                weights=self._weights(batch, programs) if wants_loss else (),
                loss_fn=with_named_draws(self._loss_fn, self._loss_draws),
                loss_scale=scale_of(loss_scale),
                pending_steps=steps,
                settings=self._programs.present,
                train=call in (Call.STEP, Call.UNSYNCHRONISED_STEP),
                synchronised=call is not Call.UNSYNCHRONISED_STEP,
                wants_loss=wants_loss,
                wants_outputs=call is Call.FORWARD,
            )
            return self._describe(job)

        self._world.failure.check()
        return self._shared(agree_on_batch(self._world, call, make, self._trainable(), self._settle))

    def repeat(self, call: Call, job: Job, paths: Mapping[int, Path]) -> Job:
        """Collective: make the job of a call again, now that more is known of its micro-batches' paths.

        Raises:
            FxChimeraError: A path cannot be recorded, here or on another rank.
        """

        def make() -> Prepared[Job]:
            programs = self._programs.find(job.batch, self._engine.accept, seed=job.seed, step=job.step, paths=paths)
            weights = job.weights
            if job.wants_loss:
                self._check_loss(programs, job.batch)
                weights = self._weights(job.batch, programs)
            return self._describe(replace(job, programs=programs, weights=weights))

        return self._shared(agree_on_batch(self._world, call, make, self._trainable(), self._settle))

    def _weights(self, batch: Batch, programs: Sequence[Program]) -> tuple[float, ...]:
        """The micro-batches' weights; of several pipelines, what counts in them, as only all pipelines together know the whole."""
        weigh = weights_of if self._world.grid.width == 1 else counts_of
        return weigh(batch, self._loss_weight, self._loss_fn, programs)

    def _shared(self, job: Job) -> Job:
        """Collective: give the micro-batches of a job their shares of the loss of all pipelines' batches.

        Raises:
            BatchError: Nothing in any of the batches counts.
        """
        grid = self._world.grid
        if grid.width == 1:
            return job
        own = torch.tensor([job.assumes, *job.weights], dtype=torch.float64, device="cpu")
        gathered = self._world.gather(own, "what counts in the batches")
        rows = [gathered[row[0]].tolist() for row in grid.processes]
        counts = [count for _, *counts in rows for count in counts]
        shares = shares_of(counts, self._loss_weight, self._loss_fn) if counts else ()
        first = grid.pipeline * len(job.weights)
        assumes = any(assumes for assumes, *_ in rows)
        return replace(job, weights=shares[first : first + len(job.weights)], others_assume=assumes)

    def warmup(
        self, signatures: Sequence[Any], *, order: Order, modes: Sequence[bool], steps: Sequence[int], lend_parameters: bool
    ) -> int:
        """Collective: record what calls with ``signatures`` would need in ``modes`` (training or not); returns how many were made.

        Args:
            signatures: As :func:`arguments_of` takes them.
            order: Its micro-batches are those of every call.
            modes: True for a step, False for a forward-only call.
            steps: The numbers of the steps whose keyed randomness decides the path through the model.
            lend_parameters: Give every rank all parameters' values meanwhile.

        Raises:
            FxChimeraError: A signature is refused, here or on another rank, or more recordings are asked for than are kept.
        """
        before = self._programs.recordings

        def make() -> Prepared[int]:
            self._engine.inspect()
            n = order.placement.n_microbatches
            pipeline, device = self._world.grid.pipeline, self._programs.device
            batches = [WarmupBatch(signature, n, self._specs, device, pipeline=pipeline) for signature in signatures]
            found: dict[Program, None] = {}
            for training, batch, step in itertools.product(modes, batches, steps):
                with in_mode(self._model, training), torch.set_grad_enabled(training):
                    self._refuse_input_gradients(batch.batch)
                    programs = self._programs.find(batch.batch, self._engine.accept, seed=self.seed, step=step)
                batch.check(programs, self.seed, step)
                found.update(dict.fromkeys(programs))
                if len(found) > KEPT:
                    raise FxChimeraError(
                        f"warmup() needs more than {KEPT} recordings, and no more are kept; pass fewer signatures or steps"
                    )
            own = [module.training for module in self._model.modules()]
            word, common = _word(repr([digest(batch.batch) for batch in batches])), _word(f"{modes!r} {own!r}")

            def text() -> str:
                return "signatures " + " and ".join(f"({describe_batch(batch.batch)})" for batch in batches)

            return Prepared(self._programs.recordings - before, common, word, 0, self._cut(tuple(found)), text)

        self._world.failure.check()
        with self._programs.in_advance(self._lent() if lend_parameters else {}):
            return agree_on_batch(self._world, Call.WARMUP, make, self._trainable(), self._settle)

    def _lent(self) -> dict[str, torch.Tensor]:
        """Collective: the values of all parameters, by canonical name; with threads every rank has them anyway."""
        if self._world.num_processes == 1:
            return {}
        mine = {} if self._world.grid.pipeline else self._engine.owned  # the others' are the same
        own = {name: parameter.detach().cpu() for name, parameter in mine.items()}
        parts = self._world.gather_objects(own, "warmup()")
        return {name: value for part in parts for name, value in part.items()}

    def _cut(self, programs: Sequence[Program]) -> int:
        """A word that agrees on two ranks iff they have recorded and cut the model alike."""
        for program in programs:
            if program not in self._cuts:
                self._cuts[program] = _word(repr([(s.nodes, s.inputs, s.received, s.sent) for s in program.plan.stages]))
        return self._cut_word.of([self._cuts[program] for program in programs])

    def _describe(self, job: Job) -> Prepared[Job]:
        modes = [module.training for module in self._model.modules()]
        common, signature = self._mode_word.of((job.loss_scale, modes)), _word(f"{digest(job.batch)} {job.weights!r}")

        def text() -> str:
            return (
                f"{describe_batch(job.batch)}, loss_scale {job.loss_scale:g}, {sum(modes)} of {len(modes)} modules in training mode"
            )

        content, cut = (sample(job.batch), self._cut(job.programs)) if self._world.num_processes > 1 else (0, 0)
        return Prepared(job, common, signature, content, cut, text)

    def _refuse_input_gradients(self, batch: Batch) -> None:
        for position, tensor in enumerate(batch.microbatches[0].inputs):
            if tensor.requires_grad and torch.is_grad_enabled() and self._world.num_processes > 1:
                raise BatchError(
                    f"input tensor {position} of shape {tuple(tensor.shape)} requires a gradient, which would stay in parts on the "
                    "ranks that read it; detach it, or make it a parameter of the model"
                )

    def _check_loss(self, programs: Sequence[Program], batch: Batch) -> None:
        for program, microbatch in zip(programs, batch.microbatches, strict=True):
            checked = self._loss_checked.setdefault(program, set())
            if microbatch.form not in checked:
                self._loss_draws |= set(check_loss(program.captured, microbatch.target, self._loss_fn))
                checked.add(microbatch.form)

    def _trainable(self) -> int:
        """A word that agrees on two ranks iff the same parameters are frozen on both."""
        return self._trainable_word.of([parameter.requires_grad for parameter in self._model.parameters()])

    def _settle(self) -> int:
        """Collective: take the owners' word for which parameters are frozen; users freeze what ``pipe.parameters()`` gives them."""
        own = {name: parameter.requires_grad for name, parameter in self._engine.owned.items()}
        gathered = self._world.gather_objects(own, "which parameters are frozen")
        flags = {name: flag for part in gathered for name, flag in part.items()}
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(flags.get(name, parameter.requires_grad))
        return self._trainable()


class _Word:
    """The word of a value of plain numbers, which is most often the same as the last time."""

    def __init__(self) -> None:
        self._value: object = None
        self._word = 0

    def of(self, value: object) -> int:
        """Return a word that agrees on two ranks iff their values do."""
        if value != self._value:
            self._value, self._word = value, _word(repr(value))
        return self._word


def _word(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
