"""A stage whose work is sleep: the emulated device of the benchmarks.

Input and weight gradient are two autograd functions, so a schedule that splits the backward really can run them apart; for ours
the stage's operator is marked as one whose weight gradient can be put off.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from fxchimera.runtime.stages.operators import splittable

__all__ = ["SleepingStage", "squared_error"]


class _SleepInput(torch.autograd.Function):
    """The identity: sleeps in forward, and in backward for the input gradient's share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.backward_seconds = backward_seconds
        time.sleep(forward_seconds)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return grad * 1.0, None, None


class _SleepWeight(torch.autograd.Function):
    """The identity on a weight row: sleeps in backward for the weight gradient's share."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, backward_seconds: float) -> Tensor:
        ctx.backward_seconds = backward_seconds
        return weight * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.backward_seconds)
        return grad.reshape(-1, grad.shape[-1]).sum(0, keepdim=True), None


@splittable
def _work(x: Tensor, weight: Tensor, forward_seconds: float, half_backward_seconds: float) -> Tensor:
    """``x + weight``, slowly."""
    return _SleepInput.apply(x, forward_seconds, half_backward_seconds) + _SleepWeight.apply(weight, half_backward_seconds)


class SleepingStage(nn.Module):
    """``x + weight`` with the given forward and backward time a micro-batch, in seconds; half of the backward is the weight's.

    The first stage has one more parameter, because its input needs no gradient and autograd would skip its input half.
    """

    def __init__(self, width: int, forward_seconds: float, backward_seconds: float, *, first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width))
        self.anchor = nn.Parameter(torch.zeros(1)) if first else None
        self.forward_seconds, self.half_backward_seconds = forward_seconds, backward_seconds / 2

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, width] to [rows, width]."""
        if self.anchor is not None:
            x = x + self.anchor
        return _work(x, self.weight, self.forward_seconds, self.half_backward_seconds)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error."""
    return ((output - target) ** 2).mean()
