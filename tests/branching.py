"""Models whose forward branches on values that depend on parameters, and what the plain model makes of a batch.

A ``Watched`` model notes the answers of its reads, so that a test can show that paths really changed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import fxchimera

__all__ = ["KINDS", "Branches", "EarlyExit", "Factors", "Ponder", "batches", "build", "plain_step", "process_steps", "square"]

WIDTH = 6


def square(output: Any) -> Tensor:
    """A loss that keeps gradients of ordinary size."""
    first = output[0] if isinstance(output, tuple) else output
    return (first - 1.0).square().mean()


class Watched(nn.Module):
    """Asks ``decide`` before every branch; ``log`` gets the answers when there is one."""

    log: list[bool] | None = None

    def decide(self, question: Tensor) -> bool:
        answer = bool(question)
        if self.log is not None:
            self.log.append(answer)
        return answer


class Branches(Watched):
    """Each layer is followed by one of two layers, by the sign of its mean."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.yes = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.no = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) if norm else nn.Identity() for _ in range(4))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for layer, yes, no, norm in zip(self.layers, self.yes, self.no, self.norms, strict=True):
            y = self.drop(norm(layer(x)))
            x = x + torch.tanh(yes(y)) if self.decide(y.mean() > y[0, 0] * 0.3) else x - torch.sigmoid(no(y))
        return x


class EarlyExit(Watched):
    """Ends as soon as the activations are small, and returns after how many layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        count = 0
        for layer in self.layers:
            x, count = torch.tanh(layer(x)) * 1.3, count + 1
            if self.decide(x.norm() < 0.85 * x.shape[0] ** 0.5):
                break
        return x, count


class Ponder(Watched):
    """Repeats a cell until the halting units are full."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell, self.halt, self.last = (
            nn.Linear(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        state, full, steps = torch.zeros_like(x), x.new_zeros(x.size(0)), 0
        while self.decide(full.mean() < 1) and steps < 6:
            state = self.cell(x, state)
            full = full + torch.sigmoid(4 * self.halt(state) - 0.5).squeeze(-1)
            steps += 1
        return self.last(state)


class Factors(Watched):
    """Takes a Cholesky factor, of something safe where it would fail, unless ``careless``."""

    def __init__(self, careless: bool = False) -> None:
        super().__init__()
        self.careless = careless
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=index > 1) for index in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        sign = x.mean().sign()
        matrix = sign * (x.T @ x + torch.eye(WIDTH, dtype=x.dtype))
        if self.decide((sign < 0) & (not self.careless)):
            matrix = -matrix
        return self.layers[3](self.layers[2](x) @ torch.linalg.cholesky(matrix))


KINDS: dict[str, Callable[..., Watched]] = {"branches": Branches, "early_exit": EarlyExit, "ponder": Ponder, "factors": Factors}


def build(kind: str, log: list[bool] | None = None, **options: Any) -> Watched:
    """Make a model in double precision; two of one kind have equal weights."""
    torch.manual_seed(3)
    model = KINDS[kind](**options).double()
    model.log = log
    return model


def batches(count: int, rows: int = 8) -> list[Tensor]:
    """Batches that differ."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) * (1 + 0.5 * index) for index in range(count)]


def plain_step(model: nn.Module, x: Tensor, n: int, backward: bool = True) -> Tensor:
    """The plain model on the micro-batches of ``x``, one after the other; gradients add to what is in ``.grad``."""
    total = torch.zeros((), dtype=x.dtype)
    for part in x.chunk(n):
        loss = square(model(part)) * (part.shape[0] / x.shape[0])
        if backward:
            loss.backward()
        total = total + loss.detach()
    return total


def process_steps(
    kind: str, stages: int, n: int, *, skew: bool = False, state: Mapping[str, Any] | None = None
) -> tuple[list[Tensor], dict[str, Any], dict[str, Any]]:
    """Train on four batches and evaluate one; returns the losses, and rank 0's full state before and after.

    With ``skew`` every process has other weights at wrap.  ``state`` is loaded first.
    """
    model, rank = build(kind), int(os.environ.get("RANK", "0"))
    if skew:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 - 0.4 * rank)
    xs = [(-1) ** index * x for index, x in enumerate(batches(4))]
    with warnings.catch_warnings(), fxchimera.pipeline(
        model, example_args=(xs[0],), loss_fn=square, num_stages=stages, n_microbatches=n, schedule="chimera", seed=7
    ) as pipe:  # fmt: skip
        warnings.simplefilter("ignore")
        if state is not None:
            pipe.load_state_dict(state if rank == 0 else {})
        start = pipe.state_dict()
        optimizer = torch.optim.SGD(pipe.parameters(), 0.5)
        losses = []
        for x in xs:
            losses.append(pipe.step(x))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(pipe.evaluate(xs[0]))
        return losses, start, pipe.state_dict()
