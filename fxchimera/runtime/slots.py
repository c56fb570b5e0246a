"""The tensors of a model as slots: one for a parameter or buffer, under all its names, with all the places where it hangs.

A tied parameter has one slot and several places.  Parameters on the meta device cannot be given values, so others take their
place, and every place has to get the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

__all__ = ["Slot", "like", "put", "slots_of"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter or buffer: its names, in the model's order, and the tensor that is there now."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    persistent: bool

    @property
    def name(self) -> str:
        """The first name, which ``named_parameters`` and ``named_buffers`` give."""
        return self.names[0]

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter."""
        return isinstance(self.tensor, nn.Parameter)

    def __str__(self) -> str:
        kind = "parameter" if self.is_parameter else "buffer" if self.persistent else "non-persistent buffer"
        return f"{kind} {self.name!r} of shape {tuple(self.tensor.shape)}"


def slots_of(model: nn.Module) -> list[Slot]:
    """Return the slots of all parameters, then of all buffers."""
    found: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            found.setdefault(id(tensor), []).append((name, tensor))
    passing = {name for path, module in model.named_modules(remove_duplicate=False) for name in _passing(path, module)}
    return [
        Slot(tuple(name for name, _ in same), same[0][1], not all(name in passing for name, _ in same)) for same in found.values()
    ]


def _passing(path: str, module: nn.Module) -> list[str]:
    """The names of a module's buffers that are in no state dict."""
    return [f"{path}.{key}" if path else key for key in module._non_persistent_buffers_set]


def like(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return an empty tensor of the same kind, layout and user's attributes on ``device``; a parameter for a parameter."""
    empty = torch.empty_like(tensor.detach(), device=device)
    made = nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    made.__dict__.update(tensor.__dict__)
    return made


def put(model: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Hang ``tensor`` in the place of the parameter or buffer ``name``; returns what was there."""
    path, _, key = name.rpartition(".")
    holder = model.get_submodule(path)
    before = holder._parameters[key] if key in holder._parameters else holder._buffers[key]
    if isinstance(holder, nn.RNNBase):
        setattr(holder, key, tensor)  # has a list of its parameters that has to follow
    elif key in holder._parameters:
        holder._parameters[key] = cast(nn.Parameter, tensor)
    else:
        holder._buffers[key] = tensor
    return cast(torch.Tensor, before)
