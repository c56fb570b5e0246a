"""Tensors of which a rank holds a part: DTensors, which FSDP2 and tensor parallelism make of parameters.

Reading one whole is a collective call of the ranks that share it, which make the same calls in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from fxchimera.errors import FxChimeraError

__all__ = ["fill", "is_sharded", "loss_without_weight", "placed_as", "reshard", "scale", "whole"]


def is_sharded(tensor: Any) -> bool:
    """Whether a rank holds only its part of ``tensor``."""
    module = sys.modules.get("torch.distributed.tensor")  # not imported for those who do without
    return module is not None and isinstance(tensor, module.DTensor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor."""
    return cast("torch.Tensor", cast(Any, tensor).full_tensor()) if is_sharded(tensor) else tensor


def reshard(root: nn.Module) -> None:
    """Give back what FSDP2 has gathered for the modules of ``root``; after a forward without a backward it keeps some."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in root.modules():
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            module.reshard()


def loss_without_weight(loss: torch.Tensor, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what the backward of a micro-batch without weight can begin with, so that it runs and gives zeros.

    FSDP2 exchanges gradients in every backward, so one that is left out would keep the other ranks waiting, where the micro-batch
    may count.  It does not begin with the loss: a mean over nothing has nan gradients, and 0 times nan is nan.
    """
    ends = [output for output in outputs if output is not loss and output.requires_grad]
    return torch.stack([(output * 0).sum().to(loss.dtype) for output in ends]).sum() if ends else loss


def fill(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy all values of a tensor, the same on every rank that shares ``target``."""
    with torch.no_grad():
        target.copy_(_shares(target, value.to(target.device)) if is_sharded(target) else value)


def placed_as(parameter: torch.Tensor, value: torch.Tensor, name: str) -> torch.Tensor:
    """Return a copy of what an optimizer keeps for a parameter, sharded as that is; ``value`` is the same on all ranks.

    Raises:
        FxChimeraError: The parameter is sharded, and ``value`` has neither its shape nor is a number.
    """
    number = value.numel() == 1 and value.shape != parameter.shape
    if not is_sharded(parameter) or number:
        return value.clone()
    if value.shape != parameter.shape:
        raise FxChimeraError(
            f"the optimizer's {name} has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}: how it would be "
            "sharded is not known; use an optimizer whose state has the parameters' shapes"
        )
    return _shares(parameter, value.to(parameter.device)).clone()


def _shares(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Shard a tensor that all ranks have as another one is; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    place: Any = like
    return distribute_tensor(value, place.device_mesh, place.placements, src_data_rank=None)


def scale(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors in place."""
    for tensor in tensors:
        part = cast(Any, tensor).to_local() if is_sharded(tensor) else tensor
        part.mul_(factor.to(part.device))
