"""The plain model's side of a comparison: a copy of it, and what that makes of the batch that the pipeline was given.

state before the step -> plain_copy -> micro-batch by micro-batch, as the pipeline's reference -> PlainRun
`-> the whole batch at once: a second opinion on the weights of micro-batches
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.batches.loss import loss_of, total_loss
from fxchimera.runtime.checks.reference import Reference, run_reference
from fxchimera.runtime.settings import attributes
from fxchimera.runtime.stages.gradients import GradientSum
from fxchimera.runtime.steps.feed import batch_on
from fxchimera.runtime.steps.job import Job
from fxchimera.runtime.undo import undo_of
from fxchimera.runtime.weights.savedfiles import digest_of
from fxchimera_passes.capture.state import without_cache
from fxchimera_passes.captured import info
from fxchimera_passes.structure import flatten

__all__ = ["Passed", "PlainRun", "of_all_pipelines", "on_host", "plain_copy", "refuse_other_draws", "run_plain", "whole_batch_loss"]


@dataclass(frozen=True, slots=True)
class Passed:
    """A batch as the user passed it."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any


@dataclass(frozen=True, slots=True)
class PlainRun:
    """What the plain model makes of one pipeline's shard; ``written`` are the buffers that it changed."""

    reference: Reference
    weights: tuple[float, ...]
    outputs: Mapping[int, list[torch.Tensor]]
    buffers: Mapping[str, torch.Tensor]
    written: frozenset[str]


def refuse_other_draws(job: Job) -> None:
    """Refuse a comparison that would find differences where there is no mistake.

    Raises:
        FxChimeraError: Stages are compiled and draw at random.
    """
    compiled = [program for program in job.programs if program.compiler is not None]
    if any(info(node).random for program in compiled for node in program.captured.graph.nodes):
        raise FxChimeraError(
            "verify() cannot compare compiled stages that draw at random (dropout): torch.compile draws other numbers than the "
            "plain model. Call pipe.eval() before and pipe.train() afterwards, set the probabilities to 0, or leave compile out"
        )


def run_plain(plain: nn.Module, job: Job, device: torch.device | None) -> PlainRun:
    """Run a job's micro-batches on the plain model, which is on ``device`` (None: where it is)."""
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
    return PlainRun(Reference(found.loss.cpu(), on_host(found.gradients), losses), job.weights, outputs, buffers, written)


def whole_batch_loss(plain: nn.Module, job: Job, call: Passed, device: torch.device | None) -> float | None:
    """Return the plain model's loss on the whole batch at once; None where it need not be that of its micro-batches.

    That is with random draws, batch norm in training, or low precision.  Losses that compare rows with each other (contrastive
    ones) cannot be told from others.  The model is as before afterwards.
    """
    norms = [module for module in plain.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    nodes = [info(node) for program in job.programs for node in program.captured.graph.nodes]
    drawn = any(program.captured.host_keys for program in job.programs) or any(node.random for node in nodes)
    coarse = any(node.autocast is not None for node in nodes)
    if drawn or coarse or any(norm.training for norm in norms):
        return None
    tensors, structure = flatten((call.args, dict(call.kwargs), call.target))
    args, kwargs, target = structure.rebuild([tensor.to(device or tensor.device) for tensor in tensors])
    undo = undo_of(plain, plain.buffers())
    try:
        with torch.no_grad(), without_cache(plain):
            loss = loss_of(plain(*args, **kwargs), target, job.loss_fn)
        return float(loss) if loss.dtype in (torch.float32, torch.float64) else None
    finally:
        undo()


def of_all_pipelines(parts: Sequence[PlainRun]) -> Reference:
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


def on_host(gradients: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Bring gradients to the CPU."""
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
