"""A model that remembers everything, and a check that nobody has made it do so."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from tests.parity import assert_same_tensors, gradients_of

__all__ = ["Stateful", "untouched"]


class Stateful(nn.Module):
    """Everything that a forward may leave behind: a count, a cache, a written buffer, statistics; and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.register_buffer("mean", torch.zeros(6))
        self.calls, self.seen = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(tuple(x.shape))
        h = self.norm(self.linear(x))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return self.drop(h)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Compare everything of a model, and the random generators, before and after."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    state, gradients = copy.deepcopy(model.state_dict()), gradients_of(model)
    objects = {name: p.grad for name, p in model.named_parameters()}
    attributes = [copy.deepcopy((m.calls, m.seen)) for m in model.modules() if isinstance(m, Stateful)]
    yield
    assert_same_tensors(model.state_dict(), state)
    assert_same_tensors(gradients_of(model), gradients)
    assert all(p.grad is objects[name] for name, p in model.named_parameters())
    assert [(m.calls, m.seen) for m in model.modules() if isinstance(m, Stateful)] == attributes
    numbers = random.random(), float(np.random.rand()), float(torch.rand(()))
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    assert numbers == (random.random(), float(np.random.rand()), float(torch.rand(())))
