"""Models with too few pieces for four stages, and what ranks of a test do with them (as in ``tests.workers``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.local.wrapped import step, wrap
from tests.models import Example, seeded

__all__ = ["KINDS", "build", "rebatch", "train"]

WIDTH, WORDS = 6, 11


class Bare(nn.Module):
    """Two layers with parameters and a stretch without between them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(4):
            x = self.drop(self.act(x)).cumsum(1)
        return self.last(x)


class Recurrent(nn.Module):
    """A language model of four pieces, the head tied to the embedding."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed, self.one, self.two = nn.Embedding(WORDS, WIDTH), *(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.drop(self.two(self.one(self.embed(ids))[0])[0]))


class Numpy(nn.Module):
    """Its own forward reads activations with numpy."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x)))
        kept = (x.detach().numpy() > -0.5).astype("float64")
        return self.norm(x * torch.from_numpy(kept).to(x.dtype))


class Inner(nn.Module):
    """Differentiates its own forward, so all of it is one piece."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.two(self.drop(torch.tanh(self.one(x)))).square().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


KINDS: dict[str, Callable[[float], nn.Module]] = {"bare": Bare, "recurrent": Recurrent, "numpy": Numpy, "inner": Inner}


def build(kind: str, *, batch: int = 12, dropout: float = 0.0, seed: int = 0) -> Example:
    """One of the models in float64, with a batch and a loss."""
    with seeded(seed) as generator:
        model = KINDS[kind](dropout).double().train()
        if kind == "recurrent":
            ids = torch.randint(WORDS, (batch, 5), generator=generator)
            return Example(model, (ids,), {}, ids.roll(-1, 1), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()))
        x, y = (torch.randn(batch, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return Example(model, (x,), {}, y, F.mse_loss)


def rebatch(example: Example, rows: int) -> Example:
    """The same model on the first rows of its batch."""
    assert example.target is not None
    return example._replace(args=tuple(value[:rows] for value in example.args), target=example.target[:rows])


def train(kind: str, stages: int, n: int, schedule: str, *, state: Any = None) -> dict[str, Any]:
    """Two optimizer steps and an evaluation of a smaller batch; every rank's optimizer has something to do."""
    example = build(kind, dropout=0.2)
    with wrap(example, stages, n, schedule) as pipe:
        if state is not None:
            pipe.load_state_dict(state)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        losses, gradients = [], {}
        for number in range(2):
            losses.append(step(pipe, example).loss)
            gradients = gradients or {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
            pipe.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            smaller = rebatch(example, 8 + number)
            losses.append(pipe.evaluate(*smaller.args, target=smaller.target))
        verified = pipe.verify(*example.args, target=example.target)
        state = pipe.state_dict()
    return {"losses": losses, "gradients": gradients, "state": state, "verified": verified.bitwise, "text": str(verified)}
