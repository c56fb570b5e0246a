"""Models whose buffers and attributes change in forward, on paths that depend on parameters or on the mode."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import fxchimera
from tests.branching import WIDTH, Branches, batches, square

__all__ = [
    "Counter",
    "Guarded",
    "Limit",
    "Moving",
    "Smoothed",
    "TiedAround",
    "TwoNorms",
    "evaluate_in_processes",
    "train_two_norms",
]


class Counter(nn.Module):
    """Scales by the number of its calls, a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * (1 + 1 / self.calls)


class TiedAround(Branches):
    """Branches between two layers with one weight; the last stage, a mirror of it, counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.counter = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Counter()
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.counter(super().forward(self.first(x))))


class Moving(Branches):
    """Whichever layer says yes first writes ``mean``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer, yes, no in zip(self.layers, self.yes, self.no, strict=True):
            y = layer(x)
            if self.decide(y.mean() > y[0, 0] * 0.3):
                x = x + torch.tanh(yes(y))
                self.mean += y.detach().mean(0)
            else:
                x = x - torch.sigmoid(no(y))
        return x * (1 + self.mean)


class Limit(nn.Module):
    """Raises when what it has seen so far was too much."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.most = nn.Linear(WIDTH, WIDTH), float("inf")
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if float(self.seen) > self.most:
            raise ValueError("too much")
        self.seen += x.detach().abs().sum()
        return self.linear(x)


class Guarded(Branches):
    """One branch in front of a limit: the wrong way gives ten times as much, or a tenth."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = Limit()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        x = (x + self.yes[0](y)) * 0.1 if self.decide(y.mean() > 0) else 10 * (x - self.no[0](y))
        return self.layers[3](self.layers[2](self.limit(self.layers[1](x))))


class TwoNorms(Branches):
    """Each way has a batch norm of its own; ``momentum`` None averages over all micro-batches."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.ups, self.downs = (nn.ModuleList(nn.BatchNorm1d(WIDTH, momentum=momentum) for _ in range(4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer, yes, no, up, down in zip(self.layers, self.yes, self.no, self.ups, self.downs, strict=True):
            y = layer(x)
            x = x + torch.tanh(up(yes(y))) if self.decide(y.mean() > y[0, 0] * 0.3) else x - torch.sigmoid(down(no(y)))
        return x


class Smoothed(nn.Module):
    """Training writes an average in the first stage and uses a copy in the last; evaluation reads the buffer itself there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.5)
        for layer in list(self.layers)[1:]:
            x = torch.tanh(layer(x))
        return x + self.mean


def evaluate_in_processes(n: int) -> tuple[str, float, float]:
    """Train one step, then evaluate; returns the error, or "", and the losses of the step and of the plain model's evaluation."""
    torch.manual_seed(3)
    model, x = Smoothed().double(), batches(1)[0]
    with warnings.catch_warnings(), fxchimera.pipeline(
        model, example_args=(x,), loss_fn=square, num_stages=int(os.environ["WORLD_SIZE"]), n_microbatches=n, schedule="1f1b"
    ) as pipe:  # fmt: skip
        warnings.simplefilter("ignore")
        loss = float(pipe.step(x))
        state = pipe.state_dict()
        try:
            found = float(pipe.evaluate(x))
        except fxchimera.FxChimeraError as error:
            return str(error), loss, 0.0
        plain = Smoothed().double().eval()
        if state:
            plain.load_state_dict(state)
            assert abs(found - float(square(plain(x)))) < 1e-12
        return "", loss, found


def train_two_norms(stages: int, n: int) -> tuple[list[Tensor], dict[str, Any]]:
    """Train on three batches and evaluate one; returns the losses and rank 0's full state."""
    torch.manual_seed(3)
    xs = batches(3, 4 * n)
    with warnings.catch_warnings(), fxchimera.pipeline(
        TwoNorms().double(), example_args=(xs[0],), loss_fn=square, num_stages=stages, n_microbatches=n, schedule="chimera", seed=7
    ) as pipe:  # fmt: skip
        warnings.simplefilter("ignore")
        optimizer = torch.optim.SGD(pipe.parameters(), 0.3)
        losses = []
        for x in xs:
            losses.append(pipe.step(x))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(pipe.evaluate(xs[0]))
        return losses, pipe.state_dict()
