"""The pipeline against the plain model on one batch: loss, outputs, every gradient, every buffer, and all copies of parameters.

    trial step on all ranks --gradients, buffers, outputs--> rank 0 <-- the plain model, micro-batch by micro-batch
                            --what crossed the cuts-------->        <-- the recording on the plain model; only after a difference

Rank 0 of every pipeline needs memory for the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.checks.compare import compare_buffers, compare_gradients, compare_values
from fxchimera.runtime.checks.plainrun import Passed, PlainRun, of_all_pipelines, on_host, plain_copy, run_plain, whole_batch_loss
from fxchimera.runtime.checks.verdict import Drifted, Row, Verification
from fxchimera.runtime.checks.witness import Crossings, fork_of, microbatch_name
from fxchimera.runtime.steps.engine import Engine
from fxchimera.runtime.steps.job import Job
from fxchimera.runtime.steps.trial import Trial
from fxchimera.runtime.weights.savedfiles import digest_of

__all__ = ["compare_with_plain"]


@dataclass(frozen=True, slots=True)
class _Own:
    """What one process has of a pipeline's step: gradients, buffers after it, losses and outputs by micro-batch, and copies.

    ``outputs`` are digests, as outputs may be large and most often are the same.
    """

    pipeline: int
    gradients: Mapping[str, torch.Tensor | None]
    buffers: Mapping[str, torch.Tensor]
    losses: Mapping[int, torch.Tensor]
    outputs: Mapping[int, tuple[str, ...]]
    copies: Mapping[tuple[int, int, str], str]


def compare_with_plain(
    engine: Engine, model: nn.Module, names: Mapping[str, tuple[str, ...]], trial: Trial, state: Mapping[str, Any], call: Passed
) -> Verification:
    """Collective: compare a step with the plain model, which rank 0 of every pipeline runs.

    Args:
        engine: The ranks.
        model: The wrapped model.
        names: All names of each parameter, by canonical name.
        trial: The step that was run.
        state: The full state before it, on rank 0.
        call: The batch.

    Raises:
        FxChimeraError: The plain model cannot be run.
    """
    world, job, device = engine.world, trial.finished.job, engine.world.devices.first
    crossings = Crossings.of(trial.finished.results)
    gathered: list[_Own] = world.collect(_own(engine, trial, crossings), "verify()")
    plain: PlainRun | None = None
    here: nn.Module | None = None
    parts: list[tuple[PlainRun | None, str | None]] = []
    if world.process == world.grid.row[0]:
        state = state if world.counterparts is None else world.counterparts.spread(state, "verify()")
        try:
            here = plain_copy(model, names, state, device)
            plain, problem = run_plain(here, job, device), None
        except Exception as error:  # too little memory, perhaps; the others are not to wait for this rank
            problem = f"{type(error).__name__}: {error}"
        own = (plain, problem)
        parts = [own] if world.counterparts is None else world.counterparts.gather(own, "verify()")
    problem = world.spread(next((text for _, text in parts if text is not None), None), "verify()")
    if problem is not None:
        raise FxChimeraError(f"verify() could not run the plain model beside the pipeline: {problem}")
    result: Verification | None = None
    if here is not None and world.process == 0:
        result = _compared(engine, here, names, trial, gathered, [part for part, _ in parts if part is not None])
        result = _with_whole_batch(result, here, job, call, engine)
    exact: bool = world.spread(result is not None and result.bitwise, "verify()")
    if not exact:
        own_fork = fork_of(world, crossings, job, here, None if plain is None else plain.outputs)
        forks = [found for found in world.collect(own_fork, "verify()") if found is not None]
        if result is not None:
            result = _with_forks(result, forks)
    answer: Verification = world.spread(result, "verify()")
    return answer


def _with_whole_batch(result: Verification, plain: nn.Module, job: Job, call: Passed, engine: Engine) -> Verification:
    """Add the loss of the batch in one piece, if this is the only pipeline; it is a remark, so nothing fails for it."""
    if engine.world.grid.width > 1:
        return result
    try:
        return replace(result, whole_batch_loss=whole_batch_loss(plain, job, call, engine.world.devices.first))
    except Exception as error:  # a model that takes no such batch, or no memory for it
        text = f"the loss of the whole batch at once ({type(error).__name__})"
        return replace(result, not_compared=(*result.not_compared, text))


def _own(engine: Engine, trial: Trial, crossings: Crossings) -> _Own:
    """Bring together what this process has; the values from pipeline 0 only, as the others have the same or their own."""
    world, results = engine.world, trial.finished.results
    first = world.grid.pipeline == 0
    losses = {m: loss.detach().cpu() for result in results for m, loss in result.losses.items()}
    last = len(engine.placement.pipes[0]) - 1
    outputs = {m: tuple(digest_of(tensor) for tensor in found) for (s, m), found in crossings.values.items() if s == last}
    return _Own(
        world.grid.pipeline,
        on_host(trial.gradients) if first else {},
        {name: buffer.cpu() for name, buffer in trial.buffers.items()} if first else {},
        losses,
        outputs,
        _copies(engine),
    )


def _copies(engine: Engine) -> dict[tuple[int, int, str], str]:
    """The digest of every parameter that is a copy, by pipe, stage and name."""
    world = engine.world
    found = {}
    for executor in engine.executors:
        for (pipe, stage), replica in executor.replicas.items():
            for name, parameter in replica.parameters.items():
                owned = engine.owned.get(name)
                itself = owned is not None and (parameter is owned or parameter.data_ptr() == owned.data_ptr() != 0)
                if not (itself and world.grid.pipeline == 0) and not parameter.is_meta:
                    found[pipe, stage, name] = digest_of(parameter.cpu())
    return found


def _compared(
    engine: Engine,
    plain: nn.Module,
    names: Mapping[str, tuple[str, ...]],
    trial: Trial,
    gathered: Sequence[_Own],
    everyones: Sequence[PlainRun],
) -> Verification:
    """On process 0: make the rows."""
    job = trial.finished.job
    plan, last = job.programs[0].plan, len(job.programs[0].plan.stages) - 1
    expected = of_all_pipelines(everyones)
    gradients = {name: gradient for own in gathered for name, gradient in own.gradients.items()}
    rows = compare_gradients(plan, gradients, expected.gradients)
    buffers = {name: buffer for own in gathered for name, buffer in own.buffers.items()}
    told, not_compared = _tellable(engine, everyones[0])
    rows += compare_buffers(plan, {name: buffer for name, buffer in buffers.items() if name in told}, told)
    for own in gathered:
        shard = everyones[own.pipeline]
        for m, loss in sorted(own.losses.items()):
            name = microbatch_name(engine.world, job, own.pipeline, m)
            rows.append(compare_values("loss", f"the loss of micro-batch {name}", last, [loss], [shard.reference.losses[m]]))
        for m, digests in sorted(own.outputs.items()):
            name, same = microbatch_name(engine.world, job, own.pipeline, m), tuple(map(digest_of, shard.outputs[m])) == digests
            # where the bits differ, how far the values are apart is looked at afterwards
            rows.append(compare_values("output", name, last, shard.outputs[m], shard.outputs[m] if same else []))
    rows.append(compare_values("loss", "the batch's loss", last, [trial.loss], [expected.loss]))
    values = {name: digest_of(plain.get_parameter(aliases[0]).cpu()) for name, aliases in names.items()}
    drifted = tuple(
        Drifted(_where(engine, own.pipeline, pipe), stage, name)
        for own in gathered
        for (pipe, stage, name), digest in own.copies.items()
        if digest != values[name]
    )
    return Verification(float(trial.loss), float(expected.loss), tuple(rows), last + 1, drifted, None, not_compared)


def _where(engine: Engine, pipeline: int, pipe: int) -> str:
    name = engine.placement.pipe_name(pipe)
    return f"({name} of pipeline {pipeline})" if engine.world.grid.width > 1 else f"({name})"


def _with_forks(result: Verification, forks: Sequence[tuple[Any, Sequence[Row]]]) -> Verification:
    """Put in what the ranks 0 of all pipelines have found out about forwards: the first fork, and the distances of outputs."""
    outputs = {row.name: row for _, rows in forks for row in rows}
    rows = tuple(outputs.get(row.name, row) if row.kind == "output" else row for row in result.rows)
    result = replace(result, rows=rows)
    found = min((fork for fork, _ in forks if fork is not None), key=lambda fork: fork.stage, default=None)
    return result if result.ok else replace(result, fork=found)


def _tellable(engine: Engine, plain: PlainRun) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """The buffers whose values after a plain loop are what the pipeline's should be, and in words which are not."""
    placement, width = engine.placement, engine.world.grid.width
    numbers = [m for pipe in range(len(placement.pipes)) for m in placement.microbatches(pipe)]
    deferred = any(replica.deferred for executor in engine.executors for replica in executor.replicas.values())
    if not plain.written or (width == 1 and not deferred and numbers == sorted(numbers)):
        return dict(plain.buffers), ()
    why = "all pipelines write them" if width > 1 else 'batch_norm="deferred"' if deferred else "the micro-batches' order"
    told = {name: value for name, value in plain.buffers.items() if name not in plain.written}
    return told, (f"{len(plain.written)} buffers that forward writes ({why})",)
