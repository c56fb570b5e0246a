"""Measure a pipeline without changing it: whole steps as they run, and every stage by itself.

The steps tell what the machine really does, the stages what a step would take if nobody disturbed anybody; their ratio is how far a
prediction can be trusted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxchimera.errors import FxChimeraError, PipelineError
from fxchimera.runtime.batches.loss import LossFn, loss_of
from fxchimera.runtime.batches.safety import refuse_unsafe
from fxchimera.runtime.devices.lanes import Lanes
from fxchimera.runtime.messages.carriers import process_transport
from fxchimera.runtime.messages.handover import local_transport
from fxchimera.runtime.microbatch import MicroBatch
from fxchimera.runtime.processes.world import LocalWorld, World
from fxchimera.runtime.stages.program import Program
from fxchimera.runtime.stages.replica import Replica
from fxchimera.runtime.steps.attempts import Attempts
from fxchimera.runtime.steps.engine import Engine
from fxchimera.runtime.steps.feed import moved
from fxchimera.runtime.steps.job import Job
from fxchimera.runtime.steps.probe import Probe, measure, probe_channels
from fxchimera.runtime.steps.results import gather_timeline
from fxchimera.runtime.steps.stagetimes import Sample
from fxchimera.runtime.steps.trial import run_trial
from fxchimera.runtime.transport import Transport
from fxchimera.runtime.undo import undo_of
from fxchimera.runtime.weights.moving import spread_model
from fxchimera.schedule.measurement import Measurement
from fxchimera.schedule.placement import Placement
from fxchimera.schedule.timeline import Timeline
from fxchimera_passes.capture.state import generators_untouched, without_cache
from fxchimera_passes.captured import Captured
from fxchimera_passes.cost import NodeCosts
from fxchimera_passes.plan import StagePlan
from fxchimera_passes.structure import flatten

__all__ = ["Profiled", "agree_on_rounds", "profile_cut", "profile_pipeline"]

_ADVICE = (
    "the model branches on values that depend on parameters, and the branch that was recorded may be the wrong one here: make the "
    "pipeline with profile=False"
)


@dataclass(frozen=True, slots=True)
class Profiled:
    """Stages and links by themselves, the seconds of a step (the median of the rounds), and this process's part of that step."""

    measurement: Measurement
    seconds: float
    timeline: Timeline


def agree_on_rounds(world: World, owned: Sequence[tuple[str, torch.Tensor]], rounds: int) -> None:
    """Collective: see that every rank means the same and has something to measure.

    Raises:
        FxChimeraError: The ranks differ, ``rounds`` is below 1, or parameters are on the meta device.
    """
    absent = next((name for name, tensor in owned if tensor.is_meta), None)
    everyone = world.gather_objects((rounds, absent), "profile()")
    asked = [other for other, _ in everyone]
    if len(set(asked)) > 1 or rounds < 1:
        raise FxChimeraError(f"profile() needs the same rounds, at least 1, on every rank; the ranks passed {asked}")
    missing = [(rank, name) for rank, (_, name) in enumerate(everyone) if name is not None]
    if missing:
        rank, name = missing[0]
        raise FxChimeraError(
            f"profile() runs the model, but parameter {name!r} (rank {rank}) is on the meta device and has no values; make the "
            "model on a real device, or plan without a measurement (pipeline(..., profile=False))"
        )


def profile_pipeline(model: nn.Module, engine: Engine, attempts: Attempts, world: World, job: Job, *, rounds: int) -> Profiled:
    """Collective: run steps like ``job``, then time the stages on one of its micro-batches; the model is as before afterwards.

    Raises:
        PipelineError: A rank failed.
    """
    with generators_untouched():
        parts, seconds = [], []
        for _ in range(rounds + 1):
            finished = run_trial(model, engine, attempts, job).finished
            job = finished.job  # its recordings have turned out right
            whole = gather_timeline(world, finished.timeline)
            assert whole is not None
            parts.append(finished.timeline)
            seconds.append(whole.makespan)
        sample = _sample(job, engine.placement, rounds)
        _refuse_repeated(sample.program, world)
        probes = engine.probes(sample)
        with _untouched(model, sample.program, probes):
            found, _ = measure(probes, world, engine.lanes)
    middle = sorted(range(1, rounds + 1), key=seconds.__getitem__)[rounds // 2]
    return Profiled(found, seconds[middle], parts[middle])


def profile_cut(
    captured: Captured,
    cut: StagePlan,
    example: MicroBatch,
    placement: Placement,
    world: World,
    *,
    loss_fn: LossFn | None,
    rounds: int = 5,
) -> tuple[Measurement, NodeCosts]:
    """Collective: time the stages of a cut, and their nodes, before the ranks are made: every process has the whole model.

    There is no target yet, so the last stage is timed without a ``loss_fn`` that takes one.

    Raises:
        FxChimeraError: The model cannot be run stage by stage, or has no values.
        PipelineError: A rank failed.
    """
    model, program, local = captured.model, Program.of(captured, cut), isinstance(world, LocalWorld)
    agree_on_rounds(world, list(model.named_parameters()), rounds)
    _refuse_repeated(program, world)
    loss = _loss(program, None, loss_fn) if loss_fn is None or _takes_output_alone(loss_fn) else None
    sample = Sample(program=program, inputs=example.inputs, loss=loss, rounds=rounds, nodes=True)
    channels, transports, probes = probe_channels(placement), list[Transport](), list[Probe]()
    spread_model(captured, cut, placement, world)
    lanes = Lanes(world.devices, world.ranks)
    shared = local_transport(channels, lanes, world.failure) if local else None
    try:
        for rank in world.ranks:
            transports.append(shared or process_transport(rank, channels, world, lanes.of(rank)))
            down = [stage for pipe, stage in placement.replicas(rank) if pipe == 0]
            where = world.devices.of(rank)
            replicas = {stage: Replica(model, program, 0, stage, shares_memory=local, device=where) for stage in down}
            probes.append(Probe(rank, placement, replicas, transports[-1], sample.on(where), world.failure))
        with generators_untouched(), _untouched(model, program, probes):
            return measure(probes, world, lanes)
    except PipelineError as error:
        if not captured.assumed:
            raise
        raise PipelineError(f"{error} ({_ADVICE})") from error
    finally:
        for transport in transports:
            transport.close()


def _takes_output_alone(loss_fn: LossFn) -> bool:
    """Whether a loss has no parameter for a target."""
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):  # torch does not always know
        return False
    return [one.kind for one in parameters] in ([inspect.Parameter.POSITIONAL_OR_KEYWORD], [inspect.Parameter.POSITIONAL_ONLY])


def _loss(program: Program, target: Any, loss_fn: LossFn | None) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    tensors, structure = flatten(target)

    def loss(outputs: list[torch.Tensor]) -> torch.Tensor:
        there = structure.rebuild([moved(tensor, outputs[0].device) for tensor in tensors]) if tensors else target
        return loss_of(program.captured.out_structure.rebuild(outputs), there, loss_fn)

    return loss


def _refuse_repeated(program: Program, world: World) -> None:
    """Refuse a model of which a stage cannot run several micro-batches one after the other, as it does in rounds."""
    refuse_unsafe(program, copies=1, n_microbatches=2, num_processes=world.num_processes, in_turn=True)


def _sample(job: Job, placement: Placement, rounds: int) -> Sample:
    """The micro-batch of the down pipe that counts most."""
    number = max(placement.microbatches(0), key=job.weights.__getitem__)
    program, microbatch = job.programs[number], job.batch.microbatches[number]
    return Sample(
        program=program,
        inputs=microbatch.inputs,
        loss=_loss(program, microbatch.target, job.loss_fn),
        weight=job.weights[number],
        randomness=(job.seed, job.step, number),
        rounds=rounds,
    )


@contextmanager
def _untouched(model: nn.Module, program: Program, probes: Sequence[Probe]) -> Iterator[None]:
    """Run stages as a step does, and put the model and the clones back as they were."""
    undo = undo_of(model, model.buffers())
    replicas = [replica for probe in probes for replica in probe.replicas.values()]
    for replica in replicas:
        replica.remember()
    try:
        with without_cache(model, always=not program.captured.cache):
            torch.clear_autocast_cache()
            yield
    finally:
        for replica in replicas:
            replica.retract()
        undo()
