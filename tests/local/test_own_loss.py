"""A model that computes its own loss weights its micro-batches by what torch's mean divides by."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxchimera

CLASSES = 5
WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0], dtype=torch.float64)


class OwnLoss(nn.Module):
    """Four layers and a cross-entropy with class weights, as a function or as a module."""

    def __init__(self, *, as_module: bool, weighted: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, CLASSES)
        self.register_buffer("classes", WEIGHTS.clone() if weighted else None)
        self.criterion = nn.CrossEntropyLoss(weight=WEIGHTS.clone() if weighted else None) if as_module else None

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x).tanh()
        scores = self.head(x)
        if self.criterion is not None:
            return self.criterion(scores, labels)
        return F.cross_entropy(scores, labels, weight=self.classes)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("as_module", [False, True])
def test_gradients_are_those_of_the_full_batch(as_module: bool, weighted: bool) -> None:
    """Unequal classes and ignored targets a micro-batch: loss and gradients are the plain full-batch step's."""
    torch.manual_seed(0)
    model = OwnLoss(as_module=as_module, weighted=weighted).double()
    x, labels = torch.randn(9, 8, dtype=torch.float64), torch.tensor([0, 0, 1, 2, -100, -100, 2, 3, 4])
    plain = copy.deepcopy(model)
    expected = plain(x, labels)
    expected.backward()
    with fxchimera.pipeline(model, example_args=(x, labels), num_stages=2, n_microbatches=4) as pipe:
        loss = pipe.step(x, labels)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-14)
