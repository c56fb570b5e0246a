"""The whole model's state over all ranks: gathered on rank 0, spread from there, always under the model's own names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.processes.world import LocalWorld, World
from fxchimera.runtime.sharded import fill, whole
from fxchimera.schedule.placement import Placement
from fxchimera_passes.plan import StagePlan

__all__ = ["gather_state", "load_state", "owned_state", "owner_process"]


def owner_process(model: nn.Module, plan: StagePlan, names: Mapping[str, tuple[str, ...]], placement: Placement) -> dict[str, int]:
    """Return the rank that holds the valid tensor of every parameter and buffer, under all its names.

    A stage is owned by its down replica.  A buffer belongs to the first stage that reads it; one that no stage reads is the same
    everywhere and belongs to rank 0.
    """
    down = placement.pipes[0]
    owner = {alias: down[plan.owner[name]] for name, aliases in names.items() for alias in aliases}
    first: dict[int, int] = {}
    for stage in plan.stages:
        for name in stage.buffers:
            first.setdefault(id(model.get_buffer(name)), down[stage.index])
    for name, buffer in model.named_buffers(remove_duplicate=False):
        owner[name] = first.get(id(buffer), 0)
    return owner


def gather_state(model: nn.Module, owner: Mapping[str, int], world: World) -> dict[str, Any]:
    """Collective: return the full ``state_dict`` on CPU on rank 0, and an empty one elsewhere."""
    state = model.state_dict()
    holds = world.ranks if world.grid.pipeline == 0 else ()  # the other pipelines have the same
    own = {key: _to_cpu(value) for key, value in state.items() if owner.get(key, 0) in holds}
    gathered: OrderedDict[str, Any] = OrderedDict()
    for key in state:  # one entry at a time bounds the memory of ranks that keep nothing
        holder = world.grid.processes[0][owner.get(key, 0)]
        value = own.get(key)
        if not isinstance(world, LocalWorld) and holder != 0:
            values = world.collect(value if world.process == holder else None, "state_dict()")
            value = values[holder] if values else None
        if world.process == 0:
            gathered[key] = value
    return dict(gathered)


def owned_state(model: nn.Module, owner: Mapping[str, int], world: World) -> dict[str, Any]:
    """Return this process's own entries of the ``state_dict``."""
    return {key: value for key, value in model.state_dict().items() if owner.get(key, 0) in world.ranks}


def load_state(model: nn.Module, state: Mapping[str, Any], owner: Mapping[str, int], world: World, *, strict: bool) -> None:
    """Collective: copy a full ``state_dict`` (rank 0's counts) into the owners' tensors.

    Raises:
        FxChimeraError: With ``strict``, keys are missing or unexpected; always, shapes differ.  Nothing is changed then.
    """
    if isinstance(world, LocalWorld):
        _check(model, state, strict=strict)
        model.load_state_dict(dict(state), strict=strict)
        return
    problem = None
    if world.process == 0:
        try:
            _check(model, state, strict=strict)
        except FxChimeraError as error:
            problem = str(error)
    problem = world.spread(problem, "load_state_dict()")
    if problem is not None:
        raise FxChimeraError(problem)
    keys = world.spread(list(state), "load_state_dict()")
    tensors = dict(model.state_dict(keep_vars=True))
    for key in keys:
        value = world.spread(state.get(key), "load_state_dict()")
        target = tensors.get(key)
        if isinstance(target, torch.Tensor) and not target.is_meta:
            fill(target, value)


def _check(model: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    expected = model.state_dict()
    missing, unexpected = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
    if strict and (missing or unexpected):
        raise FxChimeraError(
            f"the state_dict does not fit the model: of {len(expected)} keys it lacks {len(missing)}, missing {missing[:4]}, and "
            f"it has {len(unexpected)} more, unexpected {unexpected[:4]}. strict=False loads what both have"
        )
    for key in expected:
        theirs, ours = state.get(key), expected[key]
        if isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor) and theirs.shape != ours.shape:
            raise FxChimeraError(
                f"the state_dict's {key!r} has shape {tuple(theirs.shape)}, the model's {tuple(ours.shape)}; build the model as it "
                "was saved, or leave that key out and pass strict=False"
            )


def _to_cpu(value: Any) -> Any:
    return whole(value.detach()).to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
