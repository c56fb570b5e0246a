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
    """The values received by one stage for one micro-batch, and later the gradients with respect to them."""

    def __init__(self, values: Sequence[torch.Tensor], requires_grad: Sequence[bool]) -> None:
        self.gradients: list[torch.Tensor | None] = [None] * len(values)
        self._values: list[torch.Tensor] = list(values)
        self._differentiable = [i for i, wanted in enumerate(requires_grad) if wanted]

    def enter(self) -> list[torch.Tensor]:
        """Return the values as non-leaf tensors of the current graph; integers and constants as they are."""
        values = list(self._values)
        self._values = []  # the graph keeps what it needs
        if self._differentiable and torch.is_grad_enabled():
            phony = torch.empty(0, requires_grad=True, device="cpu")
            entered = apply_function(_EnterStage, phony, self, *(values[i] for i in self._differentiable))
            for i, tensor in zip(self._differentiable, entered, strict=True):
                values[i] = tensor
        return values

    def collect(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of the differentiable values, in order."""
        for i, gradient in zip(self._differentiable, gradients, strict=True):
            self.gradients[i] = gradient

    @property
    def differentiable_gradients(self) -> list[torch.Tensor | None]:
        """Gradients of the differentiable values, None where nothing flowed back."""
        return [self.gradients[i] for i in self._differentiable]


class _EnterStage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, phony: torch.Tensor, entry: Entry, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        # A detached alias is neither an input nor a view of one in autograd's books, and has a version counter of its own.
        return tuple(value.data for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        ctx.entry.collect(gradients)
        return (None,) * (2 + len(gradients))
