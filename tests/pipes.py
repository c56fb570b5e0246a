"""A model that ``torch.distributed.pipelining.pipeline`` can trace, with what its stages make hard, and its ``Pipe``."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import Pipe, SplitPoint

__all__ = ["N", "batch", "tagger", "token_loss", "traced"]

ROWS, N = 2, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Tagger(nn.Module):
    """Embedding, blocks, head; a skip over all blocks; if asked for, tied weights, and a mask that the last stage reads."""

    def __init__(self, *, tied: bool, late: bool) -> None:
        super().__init__()
        self.late = late
        self.embed, self.blocks = nn.Embedding(12, 8), nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        early = h = self.embed(tokens) * mask[..., None]
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head((h + early) * mask[..., None] if self.late else h + early)
        return logits


def tagger(tied: bool, *, late: bool = True) -> Tagger:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Tagger(tied=tied, late=late).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(12, (ROWS * N, 5), generator=generator), (torch.rand(ROWS * N, 5, generator=generator) > 0.3).double()


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def traced(model: nn.Module, stages: int) -> Pipe:
    tokens, mask = (tensor[:ROWS] for tensor in batch())
    points = {2: ["blocks.2"], 4: ["blocks.1", "blocks.2", "blocks.3"]}[stages]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export's own
        return pipelining.pipeline(model, (tokens,), {"mask": mask}, split_spec=dict.fromkeys(points, SplitPoint.BEGINNING))
