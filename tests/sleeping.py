"""Layers that sleep for a known time in forward and backward: a measurement can find more, never less."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BACKWARD", "FORWARD", "Sleep", "Slow", "slow_chain"]

FORWARD, BACKWARD = 0.004, 0.008


class Sleep(torch.autograd.Function):
    """The identity, slowly: ``factor`` times FORWARD and BACKWARD seconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        time.sleep(FORWARD * factor)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(BACKWARD * ctx.factor)
        return gradient, None


class Slow(nn.Module):
    """A linear layer, and for a factor above 0 sleep after it."""

    def __init__(self, factor: float, width: int = 6) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(width, width), factor

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return Sleep.apply(x, self.factor) if self.factor else x


def slow_chain(*factors: float) -> nn.Sequential:
    """One layer a factor; a formula takes all for equal."""
    return nn.Sequential(*(Slow(factor) for factor in factors))
