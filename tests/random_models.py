"""Chains with four blocks that draw at random, each kind in another way, and training with them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.local.toys import data, seeded
from tests.local.wrapped import step, wrap
from tests.models import Example
from tests.parity import Outcome

__all__ = ["BLOCKS", "chain_of", "steps", "unsaved"]

DEPTH, WIDTH, LENGTH = 4, 8, 3

Run = Callable[[Any, Tensor], Tensor]


class Block(nn.Module):
    """``x + run(block, linear(x))``, from (batch, length, width) to the same."""

    def __init__(self, run: Run, **children: nn.Module) -> None:
        super().__init__()
        self.run = run
        self.linear = nn.Linear(WIDTH, WIDTH)
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.run(self, self.linear(x)))


class Checkpointed(nn.Module):
    """A block that is computed again in the backward."""

    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant, self.saving = inner, reentrant, True

    def forward(self, x: Tensor) -> Tensor:
        if not self.saving:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def attend(m: Any, x: Tensor) -> Tensor:
    q = x.view(len(x), LENGTH, 2, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3).transpose(1, 2).reshape(x.shape)


def whole_or_nothing(m: Any, x: Tensor) -> Tensor:
    """Stochastic depth by row, as torchvision and timm do it."""
    return x * x.new_empty(len(x), 1, 1).bernoulli_(0.6).div_(0.6)


def layer_left_out(m: Any, x: Tensor) -> Tensor:
    """Stochastic depth by layer, as BART and wav2vec do it: the draw decides what Python does."""
    return x * 0 if torch.rand(()).item() < 0.4 else m.again(x)


def python_coin(m: Any, x: Tensor) -> Tensor:
    return m.again(x) * random.uniform(0.5, 1.5) if random.random() < 0.5 else torch.sin(x)


def numpy_rows(m: Any, x: Tensor) -> Tensor:
    """Which positions are masked is numpy's choice, as for wav2vec's time masks."""
    kept = torch.ones(LENGTH, dtype=x.dtype)
    kept[np.random.choice(LENGTH, 1)] = 0.0
    return m.again(x) * kept[:, None] + float(np.random.standard_normal())


def all_together(m: Any, x: Tensor) -> Tensor:
    return python_coin(m, numpy_rows(m, m.drop(attend(m, x))))


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def dropped() -> nn.Module:
    return Block(lambda m, x: m.drop(torch.tanh(m.again(x))), drop=nn.Dropout(0.4), again=linear())


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "dropout": dropped,
    "attention": lambda: Block(attend),
    "multi-head attention": lambda: Block(
        lambda m, x: m.attention(x, x, x, need_weights=False)[0],
        attention=nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True),
    ),
    "encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, batch_first=True),
    "lstm": lambda: Block(lambda m, x: m.lstm(x)[0], lstm=nn.LSTM(WIDTH, WIDTH, 2, dropout=0.4, batch_first=True)),
    "gru": lambda: Block(lambda m, x: m.gru(x)[0], gru=nn.GRU(WIDTH, WIDTH, 2, dropout=0.4, batch_first=True)),
    "checkpoint": lambda: Checkpointed(dropped(), reentrant=False),
    "checkpoint, reentrant": lambda: Checkpointed(dropped(), reentrant=True),
    "checkpoint of attention": lambda: Checkpointed(Block(attend), reentrant=False),
    "stochastic depth": lambda: Block(whole_or_nothing),
    "layers left out": lambda: Block(layer_left_out, again=linear()),
    "python": lambda: Block(python_coin, again=linear()),
    "numpy": lambda: Block(numpy_rows, again=linear()),
    "all together": lambda: Block(all_together, drop=nn.Dropout(0.2), again=linear()),
}


def chain_of(kind: str, rows: int) -> Example:
    """Linear layers and blocks of a kind in turns, in float64, and one batch.  The blocks have hooks, so they stay whole calls."""
    model = seeded(lambda: nn.Sequential(*(make() for _ in range(DEPTH) for make in (linear, BLOCKS[kind])), linear()))
    for block in list(model)[1::2]:
        block.register_forward_hook(lambda *_: None)
    x, target = data(rows, LENGTH, WIDTH)
    return Example(model, (x,), {}, target, F.mse_loss)


def unsaved(model: nn.Module) -> None:
    """Let nothing be computed again."""
    for module in model.modules():
        if isinstance(module, Checkpointed):
            module.saving = False


def steps(kind: str, stages: int, n: int, schedule: str) -> list[Outcome]:
    """Two steps on one batch, each with gradients of its own: those that this process owns."""
    example = chain_of(kind, 2 * n)
    outcomes = []
    with wrap(example, stages, n, schedule) as pipe:
        for _ in range(2):
            example.model.zero_grad()
            loss = step(pipe, example).loss
            outcomes.append(Outcome(loss, {name: p.grad for name, p in pipe.named_parameters()}))
    return outcomes
