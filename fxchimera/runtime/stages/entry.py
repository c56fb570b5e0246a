"""The autograd edge of a stage: values that came from another stage enter its graph here, and their gradients leave.

A received tensor must be a non-leaf, or the stage's first in-place operation on it would be refused by autograd; and it must not
be a view, or the same would hold for its base.  So it is returned by a custom Function that has no tensor input but a phony.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxchimera_passes._torch import apply_function

__all__ = ["Entry"]


class Entry:
    """The values received by one stage for one micro-batch, and later the ``gradients`` with respect to those that need one.

    A gradient is None where nothing flowed back.
    """

    def __init__(self, values: Sequence[torch.Tensor], requires_grad: Sequence[bool]) -> None:
        self._values = list(values)
        self._differentiable = [i for i, wanted in enumerate(requires_grad) if wanted]
        self.gradients: list[torch.Tensor | None] = [None] * len(self._differentiable)

    def enter(self) -> list[torch.Tensor]:
        """Return the values as non-leaf tensors of the current graph; integers and constants as they are."""
        values, self._values = self._values, []  # the graph keeps what it needs
        if self._differentiable and torch.is_grad_enabled():
            # A detached alias is neither an input nor a view of one in autograd's books, and has a version counter of its own.
            aliases = [values[i].data for i in self._differentiable]
            entered = apply_function(_EnterStage, torch.empty(0, requires_grad=True, device="cpu"), self, aliases)
            for i, tensor in zip(self._differentiable, entered, strict=True):
                values[i] = tensor
        return values


class _EnterStage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, phony: torch.Tensor, entry: Entry, aliases: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        return tuple(aliases)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        ctx.entry.gradients = [*gradients]
        return None, None, None
