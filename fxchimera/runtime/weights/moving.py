"""Bring a model's parameters and buffers to the devices of the ranks that own them, and drop those that other processes own.

They stay the user's own objects: an optimizer made before or after holds the same parameters, and ties stay ties.  What several
stages read has one place, and the other stages have copies (see ``stagebuffers``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.devices.streams import is_host
from fxchimera.runtime.processes.world import World
from fxchimera.runtime.weights.state import owner_process
from fxchimera.schedule.placement import Placement
from fxchimera_passes.captured import Captured
from fxchimera_passes.plan import StagePlan

__all__ = ["drop_unowned", "move_model", "spread_model"]


def spread_model(captured: Captured, plan: StagePlan, placement: Placement, world: World) -> None:
    """Move every tensor that a rank of this process owns to the rank's device.

    Raises:
        FxChimeraError: Ranks compute on the CPU, but a parameter or buffer is elsewhere.
    """
    devices, model = world.devices, captured.model
    if devices.by_rank:
        owner = owner_process(model, plan, captured.parameters, placement)
        _move(model, {name: devices.by_rank[rank] for name, rank in owner.items() if rank in world.ranks})
        return
    for name, tensor in _tensors(model):
        if not is_host(tensor.device):
            raise FxChimeraError(
                f"{name!r} is on {tensor.device}, but ranks compute on the CPU; move the model there, or name devices with devices="
            )


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move the whole model to one device."""
    _move(model, {name: device for name, _ in _tensors(model)})


def _move(model: nn.Module, places: Mapping[str, torch.device]) -> None:
    for name, tensor in _tensors(model):
        device = places.get(name)
        if device is not None and tensor.device != device and not tensor.is_meta:
            _to(tensor, device)
    for module in model.modules() if places else ():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # the device's own layout, as after ``module.to(device)``


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _to(tensor: torch.Tensor, device: torch.device) -> None:
    """Give a tensor object other memory; its gradient comes along."""
    gradient, tensor.grad = (tensor.grad, None) if tensor.is_leaf else (None, None)
    moved = tensor.detach().to(device)
    try:
        tensor.data = moved
    except RuntimeError:  # torch takes the memory of some kinds of device this way only
        moved = nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
        vars(moved).update(vars(tensor))
        torch.utils.swap_tensors(tensor, moved)  # type: ignore[no-untyped-call]
    if gradient is not None:
        tensor.grad = gradient.to(device)


def drop_unowned(model: nn.Module, owned: set[int]) -> list[nn.Parameter]:
    """Replace the parameters whose ``id`` is not in ``owned`` by meta tensors, keeping ties; returns what was replaced.

    Whoever knows these by their ``id`` has to forget them before they are freed and others get the same.
    """
    dropped = []
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in owned or parameter.is_meta:
                continue
            meta = torch.empty_like(parameter, device="meta")
            stand_in = replaced.setdefault(id(parameter), nn.Parameter(meta, requires_grad=parameter.requires_grad))
            dropped.append(parameter)
            if isinstance(module, nn.RNNBase):
                setattr(module, name, stand_in)  # has a list of its parameters that has to follow
            else:
                module._parameters[name] = stand_in
    return dropped
