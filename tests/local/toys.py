"""Tiny float64 models and data, and the plain step they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxchimera
from fxchimera import Pipeline
from tests.parity import Outcome, gradients_of

__all__ = ["WIDTH", "Tanh", "chain", "data", "plain", "seeded", "wrapped"]

WIDTH = 6


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a float64 model with weights that depend on ``seed`` only; torch's generator is as before afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().double().train()


class Tanh(nn.Module):
    """Linear and tanh: one layer of a chain."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def chain(layers: int, width: int = WIDTH) -> nn.Sequential:
    """Equal layers, one after the other."""
    return seeded(lambda: nn.Sequential(*(Tanh(width) for _ in range(layers))))


def data(rows: int, *shape: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Inputs and targets of ``rows`` rows."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, *(shape or (WIDTH,)), generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def wrapped(model: nn.Module, *example: Any, loss_fn: Any = F.mse_loss, schedule: Any = "chimera", **options: Any) -> Pipeline:
    """Wrap with positional example arguments, for an order that takes no time to find."""
    return fxchimera.pipeline(model, example_args=example, loss_fn=loss_fn, schedule=schedule, **options)


def plain(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> Outcome:
    """One plain full-batch step."""
    loss = loss_of(model)
    loss.backward()
    return Outcome(loss.detach(), gradients_of(model))
