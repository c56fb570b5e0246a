"""The pipeline against the plain model on one batch, parameter by parameter."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxchimera.runtime.feed import batch_on
from fxchimera.runtime.gradients import GradientSum
from fxchimera.runtime.job import Job
from fxchimera.runtime.loss import total_loss
from fxchimera.runtime.reference import Reference, run_reference
from fxchimera.runtime.settings import attributes
from fxchimera.runtime.world import World
from fxchimera_passes.plan import StagePlan

__all__ = ["Difference", "Verification", "compare", "compare_with_plain", "plain_copy"]

_RELATIVE = {torch.float64: 1e-12, torch.float32: 1e-6}
_COARSE = 5e-2  # for half precision
_FLOOR = 1e-3  # of the norm of all gradients: a gradient that is zero in theory is noise in practice


@dataclass(frozen=True, slots=True)
class Difference:
    """One parameter: the largest absolute difference of its gradient, and the difference's norm relative to the gradient's."""

    name: str
    stage: int
    absolute: float
    relative: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the relative difference is within the tolerance (a nan is not)."""
        return self.relative <= self.tolerance


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of ``pipe.verify``; true in a condition when loss and every gradient agree."""

    loss: float
    plain_loss: float
    differences: tuple[Difference, ...]
    loss_ok: bool

    @property
    def ok(self) -> bool:
        """Whether loss and every gradient agree."""
        return self.loss_ok and all(difference.ok for difference in self.differences)

    @property
    def bitwise(self) -> bool:
        """Whether loss and every gradient are the same to the last bit."""
        return self.loss == self.plain_loss and all(difference.absolute == 0.0 for difference in self.differences)

    @property
    def first_bad_stage(self) -> int | None:
        """The first stage with a gradient that differs, None when all agree."""
        return min((d.stage for d in self.differences if not d.ok), default=None)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        worst = max(self.differences, key=lambda d: d.relative / d.tolerance, default=None)
        verdict = "equal to the last bit" if self.bitwise else "equal within tolerance" if self.ok else "DIFFERENT"
        lines = [f"pipeline and plain model are {verdict}: loss {self.loss:.9g} and {self.plain_loss:.9g}"]
        if worst is not None and not self.bitwise:
            lines.append(f"largest difference: {worst.name} (stage {worst.stage}), relative {worst.relative:.2g}")
        if self.first_bad_stage is not None:
            lines.append(f"first stage that differs: {self.first_bad_stage}")
            lines += [
                f"  stage {d.stage}  {d.name}: absolute {d.absolute:.3g}, relative {d.relative:.3g} (tolerance {d.tolerance:g})"
                for d in self.differences
                if not d.ok
            ]
        return "\n".join(lines)


def compare_with_plain(
    world: World,
    model: nn.Module,
    names: Mapping[str, tuple[str, ...]],
    job: Job,
    state: Mapping[str, Any],
    loss: torch.Tensor,
    own: Mapping[str, torch.Tensor | None],
) -> Verification:
    """Collective: compare a job's loss and gradients with those of the plain model, which rank 0 of every pipeline runs.

    Args:
        world: The processes.
        model: The wrapped model.
        names: All names of each parameter, by canonical name.
        job: The step that was run.
        state: The full state before it, on rank 0.
        loss: Its loss.
        own: The gradients that this process owns.
    """
    gathered = world.collect(_on_host(own) if world.grid.pipeline == 0 else {}, "verify()")
    result: Verification | None = None
    if world.process == world.grid.row[0]:
        device = world.devices.first
        plain = plain_copy(model, names, _state_of_first(world, state), device)
        batch = job.batch if device is None else batch_on(job.batch, device)
        shares, place = job.weights, job.order.placement
        expected = run_reference(
            plain, batch, job.programs, place, weights=shares, loss_fn=job.loss_fn, seed=job.seed, step=job.step
        )
        losses = tuple(each.cpu() for each in expected.losses)
        expected = Reference(expected.loss.cpu(), _on_host(expected.gradients), losses)
        expected = _of_all_pipelines(world, expected, shares)
        found = {name: gradient for part in gathered for name, gradient in part.items()}
        if world.process == 0:
            result = compare(job.programs[0].plan, found, expected.gradients, loss, expected.loss)
    answer: Verification = world.spread(result, "verify()")
    return answer


def _state_of_first(world: World, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Collective among the ranks 0 of all pipelines: return what the one of pipeline 0 has."""
    found: Mapping[str, Any] = state if world.counterparts is None else world.counterparts.spread(state, "verify()")
    return found


def _of_all_pipelines(world: World, own: Reference, weights: tuple[float, ...]) -> Reference:
    """Collective among the ranks 0 of all pipelines: sum what the plain model gives for their shards, ascending."""
    if world.counterparts is None:
        return own
    parts: list[tuple[Reference, tuple[float, ...]]] = world.counterparts.gather((own, weights), "verify()")
    losses = dict(enumerate(loss for part, _ in parts for loss in part.losses))
    sums = {name: GradientSum() for name in parts[0][0].gradients}
    for pipeline, (part, _) in enumerate(parts):
        for name, gradient in part.gradients.items():
            sums[name].add((pipeline, 0), gradient)
    everyones = tuple(weight for _, shares in parts for weight in shares)
    return Reference(total_loss(losses, everyones, own.loss.dtype), {name: total.total() for name, total in sums.items()})


def compare(
    plan: StagePlan,
    gradients: Mapping[str, torch.Tensor | None],
    plain: Mapping[str, torch.Tensor | None],
    loss: torch.Tensor,
    plain_loss: torch.Tensor,
) -> Verification:
    """Compare the gradients of the pipeline with the plain model's; relative to each gradient's norm, with a floor."""
    whole = sum(float(_wide(g).norm()) ** 2 for g in plain.values() if g is not None) ** 0.5
    differences = []
    for name, expected in plain.items():
        found = gradients.get(name)
        absolute, norm, distance = 0.0, 0.0, 0.0
        if (found is None) != (expected is None):
            absolute = distance = float("inf")
        elif found is not None and expected is not None:
            delta = _wide(found) - _wide(expected)
            absolute, distance = float(delta.abs().max()) if delta.numel() else 0.0, float(delta.norm())
            norm = float(_wide(expected).norm())
        scale = max(norm, _FLOOR * whole)
        relative = 0.0 if distance == 0.0 else distance / scale if scale else float("inf")
        dtype = expected.dtype if expected is not None else torch.float32
        differences.append(Difference(name, plan.owner[name], absolute, relative, _RELATIVE.get(dtype, _COARSE)))
    tolerance = _RELATIVE.get(plain_loss.dtype, _COARSE)
    close = abs(float(loss) - float(plain_loss)) <= tolerance * max(abs(float(plain_loss)), 1e-30)
    return Verification(float(loss), float(plain_loss), tuple(differences), close)


def _on_host(gradients: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {name: None if gradient is None else gradient.cpu() for name, gradient in gradients.items()}


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In double precision, and dense."""
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


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
