"""The pipeline against the plain model on one batch: loss, outputs, every gradient, every buffer, and all copies of parameters.

    trial step on all ranks --gradients, buffers, outputs--> rank 0 <-- the plain model, micro-batch by micro-batch
                            --what crossed the cuts-------->        <-- the recording on the plain model; only after a difference

Rank 0 of every pipeline needs memory for the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fxchimera.runtime.compare import compare_buffers, compare_gradients, compare_values
from fxchimera.runtime.engine import Engine
from fxchimera.runtime.feed import batch_on
from fxchimera.runtime.gradients import GradientSum
from fxchimera.runtime.job import Job
from fxchimera.runtime.loss import total_loss
from fxchimera.runtime.reference import Reference, run_reference
from fxchimera.runtime.savedfiles import digest_of
from fxchimera.runtime.settings import attributes
from fxchimera.runtime.trial import Trial
from fxchimera.runtime.verdict import Drifted, Row, Verification
from fxchimera.runtime.witness import Crossings, fork_of, microbatch_name
from fxchimera_passes.structure import flatten

__all__ = ["compare_with_plain", "plain_copy"]


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


@dataclass(frozen=True, slots=True)
class _Plain:
    """What the plain model makes of one pipeline's shard."""

    reference: Reference
    weights: tuple[float, ...]
    outputs: Mapping[int, list[torch.Tensor]]
    buffers: Mapping[str, torch.Tensor]
    written: frozenset[str]


def compare_with_plain(
    engine: Engine, model: nn.Module, names: Mapping[str, tuple[str, ...]], trial: Trial, state: Mapping[str, Any]
) -> Verification:
    """Collective: compare a step with the plain model, which rank 0 of every pipeline runs.

    Args:
        engine: The ranks.
        model: The wrapped model.
        names: All names of each parameter, by canonical name.
        trial: The step that was run.
        state: The full state before it, on rank 0.
    """
    world, job = engine.world, trial.finished.job
    crossings = Crossings.of(trial.finished.results)
    gathered: list[_Own] = world.collect(_own(engine, trial, crossings), "verify()")
    plain: _Plain | None = None
    here: nn.Module | None = None
    result: Verification | None = None
    everyones: list[_Plain] = []
    if world.process == world.grid.row[0]:
        state = state if world.counterparts is None else world.counterparts.spread(state, "verify()")
        here = plain_copy(model, names, state, world.devices.first)
        plain = _run_plain(here, job, world.devices.first)
        everyones = [plain] if world.counterparts is None else world.counterparts.gather(plain, "verify()")
    if world.process == 0:
        assert here is not None
        result = _compared(engine, here, names, trial, gathered, everyones)
    exact: bool = world.spread(result is not None and result.bitwise, "verify()")
    if not exact:
        own_fork = fork_of(world, crossings, job, here, None if plain is None else plain.outputs)
        forks = [found for found in world.collect(own_fork, "verify()") if found is not None]
        if result is not None:
            result = _with_forks(result, forks)
    answer: Verification = world.spread(result, "verify()")
    return answer


def _own(engine: Engine, trial: Trial, crossings: Crossings) -> _Own:
    """Bring together what this process has; the values from pipeline 0 only, as the others have the same or their own."""
    world, results = engine.world, trial.finished.results
    first = world.grid.pipeline == 0
    losses = {m: loss.detach().cpu() for result in results for m, loss in result.losses.items()}
    last = len(engine.placement.pipes[0]) - 1
    outputs = {m: tuple(digest_of(tensor) for tensor in found) for (s, m), found in crossings.values.items() if s == last}
    return _Own(
        world.grid.pipeline,
        _on_host(trial.gradients) if first else {},
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


def _run_plain(plain: nn.Module, job: Job, device: torch.device | None) -> _Plain:
    batch = job.batch if device is None else batch_on(job.batch, device)
    outputs: dict[int, list[torch.Tensor]] = {}
    before = {name: buffer.detach().clone() for name, buffer in plain.named_buffers(remove_duplicate=False)}

    def watch(microbatch: int, output: Any) -> None:
        outputs[microbatch] = [tensor.detach().to("cpu", copy=True) for tensor in flatten(output)[0]]

    found = run_reference(
        plain, batch, job.programs, job.order.placement, weights=job.weights, loss_fn=job.loss_fn, seed=job.seed, step=job.step,
        watch=watch,
    )  # fmt: skip
    losses = tuple(each.cpu() for each in found.losses)
    buffers = {name: buffer.detach().cpu() for name, buffer in plain.named_buffers(remove_duplicate=False)}
    written = frozenset(name for name, buffer in plain.named_buffers(remove_duplicate=False) if not _same(buffer, before[name]))
    reference = Reference(found.loss.cpu(), _on_host(found.gradients), losses)
    return _Plain(reference, job.weights, outputs, buffers, written)


def _compared(
    engine: Engine,
    plain: nn.Module,
    names: Mapping[str, tuple[str, ...]],
    trial: Trial,
    gathered: Sequence[_Own],
    everyones: Sequence[_Plain],
) -> Verification:
    """On process 0: make the rows."""
    job = trial.finished.job
    plan, last = job.programs[0].plan, len(job.programs[0].plan.stages) - 1
    expected = _of_all_pipelines(everyones)
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


def _tellable(engine: Engine, plain: _Plain) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """The buffers whose values after a plain loop are what the pipeline's should be, and in words which are not."""
    placement, width = engine.placement, engine.world.grid.width
    numbers = [m for pipe in range(len(placement.pipes)) for m in placement.microbatches(pipe)]
    deferred = any(replica.deferred for executor in engine.executors for replica in executor.replicas.values())
    if not plain.written or (width == 1 and not deferred and numbers == sorted(numbers)):
        return dict(plain.buffers), ()
    why = "all pipelines write them" if width > 1 else 'batch_norm="deferred"' if deferred else "the micro-batches' order"
    told = {name: value for name, value in plain.buffers.items() if name not in plain.written}
    return told, (f"{len(plain.written)} buffers that forward writes ({why})",)


def _of_all_pipelines(parts: Sequence[_Plain]) -> Reference:
    """Sum what the plain model gives for the shards of all pipelines, ascending."""
    if len(parts) == 1:
        return parts[0].reference
    losses = dict(enumerate(loss for part in parts for loss in part.reference.losses))
    sums = {name: GradientSum() for name in parts[0].reference.gradients}
    for pipeline, part in enumerate(parts):
        for name, gradient in part.reference.gradients.items():
            sums[name].add((pipeline, 0), gradient)
    everyones = tuple(weight for part in parts for weight in part.weights)
    loss = total_loss(losses, everyones, parts[0].reference.loss.dtype)
    return Reference(loss, {name: total.total() for name, total in sums.items()})


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and digest_of(one.cpu()) == digest_of(other.cpu())


def _on_host(gradients: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {name: None if gradient is None else gradient.cpu() for name, gradient in gradients.items()}


def plain_copy(
    model: nn.Module, names: Mapping[str, tuple[str, ...]], state: Mapping[str, Any], device: torch.device | None = None
) -> nn.Module:
    """Return a copy of ``model`` with the parameters and buffers of ``state`` and gradients of its own, on ``device`` if given."""
    memo: dict[int, Any] = {}
    if device is not None:
        others = [value for module in model.modules() for value in attributes(module).values()]
        held = [*model.buffers(), *(value for value in others if isinstance(value, torch.Tensor))]
        memo |= {id(tensor): tensor.detach().to(device, copy=True) for tensor in held}
    for aliases in names.values():
        parameter = model.get_parameter(aliases[0])
        value = next((state[alias] for alias in aliases if alias in state), None)
        data = parameter.detach() if value is None else value.to(device or value.device, parameter.dtype)
        memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    clone: nn.Module = copy.deepcopy(model, memo)
    for name, buffer in clone.named_buffers(remove_duplicate=False):
        if name in state:
            buffer.copy_(state[name])
    return clone
