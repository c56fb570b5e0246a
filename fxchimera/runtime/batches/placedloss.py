"""A loss that holds tensors, such as the weights of classes, on the device where it is computed.

The last stage of the down pipe and that of the up pipe are on two ranks, perhaps on two devices, so each job gets a copy on each.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.batches.loss import LossFn, place_of
from fxchimera.runtime.settings import attributes
from fxchimera_passes._torch import version

__all__ = ["placed_loss"]


def placed_loss(loss_fn: LossFn | None, device: torch.device) -> LossFn | None:
    """Return ``loss_fn`` with the tensors of a module, or of a partial's arguments, on ``device``; itself if they are there."""
    held = [tensor for tensor in _tensors(loss_fn) if tensor.device != device]
    return loss_fn if loss_fn is None or not held else _Placed(loss_fn, held, device)


class _Placed:
    """A copy of a loss; what it writes into its own tensors would be lost, so that is refused."""

    def __init__(self, loss_fn: LossFn, held: list[torch.Tensor], device: torch.device) -> None:
        self.__wrapped__ = loss_fn
        self._copies = [tensor.detach().to(device) for tensor in held]
        memo: dict[int, Any] = {id(tensor): _like(tensor, on) for tensor, on in zip(held, self._copies, strict=True)}
        self._loss_fn: Callable[..., torch.Tensor] = _copied(loss_fn, memo)
        self._versions = [version(on) for on in self._copies]

    def __call__(self, *args: Any) -> torch.Tensor:
        loss = self._loss_fn(*args)
        if [version(on) for on in self._copies] != self._versions:
            raise FxChimeraError(
                f"loss_fn {place_of(self.__wrapped__)} writes into a tensor of its own, which was copied to the device of the last "
                "stage; keep such a tensor in the model, or on that device"
            )
        return loss


def _tensors(loss_fn: Any) -> Iterator[torch.Tensor]:
    if isinstance(loss_fn, functools.partial):
        yield from _tensors(loss_fn.func)
        yield from (value for value in (*loss_fn.args, *loss_fn.keywords.values()) if isinstance(value, torch.Tensor))
    elif isinstance(loss_fn, nn.Module):
        yield from (*loss_fn.parameters(), *loss_fn.buffers())
        for module in loss_fn.modules():
            yield from (value for value in attributes(module).values() if isinstance(value, torch.Tensor))


def _copied(loss_fn: Any, memo: dict[int, Any]) -> Any:
    if isinstance(loss_fn, functools.partial):
        args = [memo.get(id(value), value) for value in loss_fn.args]
        keywords = {name: memo.get(id(value), value) for name, value in loss_fn.keywords.items()}
        return functools.partial(_copied(loss_fn.func, memo), *args, **keywords)
    return copy.deepcopy(loss_fn, memo) if isinstance(loss_fn, nn.Module) else loss_fn


def _like(tensor: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(on, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else on
