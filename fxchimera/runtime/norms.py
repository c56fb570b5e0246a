"""The global gradient norm over all ranks, with every parameter counted once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fxchimera.runtime.world import World

__all__ = ["clip_gradients"]


def clip_gradients(
    owned: Mapping[str, nn.Parameter], names: Sequence[str], world: World, max_norm: float, norm_type: float
) -> torch.Tensor:
    """Collective: scale the owned gradients so that the norm over all of ``names`` is at most ``max_norm``; returns that norm.

    The parameters' norms are combined in one fixed order, so every rank gets the same number, to the last bit, in any world.
    """
    norms = torch.zeros(len(names), dtype=torch.float64)
    for i, name in enumerate(names):
        gradient = owned[name].grad if name in owned else None
        if gradient is not None:
            norms[i] = torch.linalg.vector_norm(gradient.detach(), norm_type).to("cpu", torch.float64)
    total: torch.Tensor = torch.linalg.vector_norm(
        torch.stack(world.gather(norms)).sum(0), norm_type
    )  # all but one addend are zero
    with_gradients = [parameter for parameter in owned.values() if parameter.grad is not None]
    nn.utils.clip_grads_with_norm_(with_gradients, max_norm, total)
    return total.to(torch.float32)
