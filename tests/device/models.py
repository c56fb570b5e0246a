"""Small models in double precision that make tensors of their own, share them, and count calls."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Blocks", "Tied", "batch"]

WIDTH = 8


class Block(nn.Module):
    """A residual block with dropout, and with positions made on the device of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        return self.norm(x + self.down(F.dropout(torch.relu(self.up(x + positions)), 0.2, self.training)))


class Blocks(nn.Module):
    """Blocks with batch norm between them, recorded node by node."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 3)
        self.offset = torch.ones(WIDTH, dtype=torch.float64)  # neither parameter nor buffer
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = norm(block(x))
        return self.head(x + self.offset)


class Tied(nn.Module):
    """The first and the last layer share a weight, all layers read one buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.head = nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale
        for layer in self.inner:
            x = x + torch.tanh(layer(x)) * self.scale
        return self.head(self.last(x) * self.scale)


def batch(rows: int = 16) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=generator).double(), torch.randn(rows, 3, generator=generator).double()
