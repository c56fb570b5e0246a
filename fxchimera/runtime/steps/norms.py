"""The global gradient norm over all ranks, with every parameter counted once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fxchimera.runtime.processes.world import World
from fxchimera.runtime.sharded import is_sharded, scale, whole

__all__ = ["clip_gradients"]


def clip_gradients(
    owned: Mapping[str, nn.Parameter], names: Mapping[str, torch.dtype], world: World, max_norm: float, norm_type: float
) -> torch.Tensor:
    """Collective: scale the owned gradients so that the norm over all of ``names`` is at most ``max_norm``; returns that norm.

    The parameters' norms are combined in one fixed order, so every rank gets the same number, to the last bit, in any world.  It
    is double precision if a parameter is, else single.
    """
    norms = torch.zeros(len(names), dtype=torch.float64, device="cpu")
    found: dict[torch.device, dict[int, torch.Tensor]] = {}
    for i, name in enumerate(names):
        gradient = owned[name].grad if name in owned else None
        if gradient is not None:
            norm = whole(torch.linalg.vector_norm(_values(gradient), norm_type)).to(torch.float64)
            found.setdefault(norm.device, {})[i] = norm
    for there in found.values():  # one read for each device, as the host waits for it
        norms[list(there)] = torch.stack(list(there.values())).cpu()
    gathered = world.gather(norms, "clip_grad_norm_()")
    pipeline = dict.fromkeys(world.grid.processes[0])  # the others have the same gradients
    everything = torch.stack([gathered[process] for process in pipeline]).sum(0)  # all but one addend are zero
    total: torch.Tensor = torch.linalg.vector_norm(everything, norm_type)
    gradients = [parameter.grad for parameter in owned.values() if parameter.grad is not None]
    dense = [p for p in owned.values() if p.grad is not None and not p.grad.is_sparse and not is_sharded(p.grad)]
    nn.utils.clip_grads_with_norm_(dense, max_norm, total)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch does, which refuses sparse ones, and sharded ones beside others
    for gradient in gradients:
        if gradient.is_sparse:
            gradient.mul_(float(factor))
    scale([gradient for gradient in gradients if is_sharded(gradient)], factor)
    wide = any(dtype in (torch.float64, torch.complex128) for dtype in names.values())
    return total if wide else total.to(torch.float32)


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.detach().coalesce().values() if gradient.is_sparse else gradient.detach()
