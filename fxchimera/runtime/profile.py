"""Measure a pipeline without changing it: whole steps as they run, and every stage by itself.

The steps tell what the machine really does, the stages what a step would take if nobody disturbed anybody; their ratio is how far a
prediction can be trusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.attempts import Attempts
from fxchimera.runtime.distributed import DistributedTransport
from fxchimera.runtime.engine import Engine
from fxchimera.runtime.job import Job
from fxchimera.runtime.local import LocalTransport
from fxchimera.runtime.loss import LossFn, loss_of
from fxchimera.runtime.microbatch import MicroBatch
from fxchimera.runtime.probe import Probe, measure, probe_channels
from fxchimera.runtime.program import Program
from fxchimera.runtime.replica import Replica
from fxchimera.runtime.results import gather_timeline
from fxchimera.runtime.safety import refuse_unsafe
from fxchimera.runtime.stagetimes import Sample
from fxchimera.runtime.transport import Transport
from fxchimera.runtime.trial import run_trial
from fxchimera.runtime.undo import undo_of
from fxchimera.runtime.world import LocalWorld, World
from fxchimera.schedule.measurement import Measurement
from fxchimera.schedule.placement import Placement
from fxchimera.schedule.timeline import Timeline
from fxchimera_passes.capture.state import generators_untouched, without_cache
from fxchimera_passes.captured import Captured
from fxchimera_passes.cost import NodeCosts
from fxchimera_passes.plan import StagePlan

__all__ = ["Profiled", "agree_on_rounds", "profile_cut", "profile_pipeline"]


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
        with _untouched(model, sample.program, [replica for probe in probes for replica in probe.replicas.values()]):
            found, _ = measure(probes, world)
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

    Without a target there is no ``loss_fn`` to call: the last stage is timed without it.

    Raises:
        FxChimeraError: The model cannot be run stage by stage, or has no values.
        PipelineError: A rank failed.
    """
    model, program = captured.model, Program.of(captured, cut)
    agree_on_rounds(world, list(model.named_parameters()), rounds)
    _refuse_repeated(program, world)

    def loss(outputs: list[torch.Tensor]) -> torch.Tensor:
        return loss_of(program.captured.out_structure.rebuild(outputs), None, None)

    sample = Sample(program=program, inputs=example.inputs, loss=loss if loss_fn is None else None, rounds=rounds, nodes=True)
    channels, local = probe_channels(placement), isinstance(world, LocalWorld)
    shared: Transport | None = LocalTransport(channels, world.failure) if local else None
    probes: list[Probe] = []
    transports: list[Transport] = []
    try:
        for rank in world.ranks:
            transports.append(shared or DistributedTransport(rank, channels, world.failure))
            stages = [stage for pipe, stage in placement.replicas(rank) if pipe == 0]
            replicas = {stage: Replica(model, program, 0, stage, shares_memory=local) for stage in stages}
            probes.append(Probe(rank, placement, replicas, transports[-1], sample, world.failure))
        replicas_here = [replica for probe in probes for replica in probe.replicas.values()]
        with generators_untouched(), _untouched(model, program, replicas_here):
            return measure(probes, world)
    finally:
        for transport in transports:
            transport.close()


def _refuse_repeated(program: Program, world: World) -> None:
    """Refuse a model of which a stage cannot run several micro-batches one after the other, as it does in rounds."""
    refuse_unsafe(program, copies=1, n_microbatches=2, num_processes=world.num_processes, in_turn=True)


def _sample(job: Job, placement: Placement, rounds: int) -> Sample:
    """The micro-batch of the down pipe that counts most."""
    number = max(placement.microbatches(0), key=job.weights.__getitem__)
    program, microbatch = job.programs[number], job.batch.microbatches[number]

    def loss(outputs: list[torch.Tensor]) -> torch.Tensor:
        return loss_of(program.captured.out_structure.rebuild(outputs), microbatch.target, job.loss_fn)

    return Sample(
        program=program,
        inputs=microbatch.inputs,
        loss=loss,
        weight=job.weights[number],
        randomness=(job.seed, job.step, number),
        rounds=rounds,
    )


@contextmanager
def _untouched(model: nn.Module, program: Program, replicas: Sequence[Replica]) -> Iterator[None]:
    """Run stages as a step does, and put the model and the clones back as they were."""
    undo = undo_of(model, model.buffers())
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
