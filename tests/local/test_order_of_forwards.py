"""An order of one's own that runs forwards out of turn: gradients are the plain model's, state between micro-batches is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxchimera
from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.families import make_order
from fxchimera.schedule.order import Order
from tests.local.toys import WIDTH, Tanh, chain, data, seeded, wrapped


def descending(ranks: int, n: int) -> Order:
    """GPipe with its forwards from the last micro-batch to the first."""
    order = make_order("gpipe", ranks, n)
    turned = (
        tuple(Action(a.stage, a.kind, n - 1 - (a.microbatch or 0)) if a.kind is Kind.F else a for a in rank) for rank in order.ranks
    )
    return Order("descending", order.placement, tuple(turned))


class Counted(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Tanh() for _ in range(4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        for layer in self.layers:
            x = layer(x) / self.count
        return x


class Calls(Tanh):
    """Counts its calls in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


def test_gradients_equal_the_plain_models() -> None:
    x, y = data(8)
    model, plain = chain(4), chain(4)
    with wrapped(model, x, num_stages=2, n_microbatches=4, schedule=descending) as pipe:
        pipe.step(x, target=y)
    F.mse_loss(plain(x), y).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (Counted, "buffer 'count'"),
        (lambda: nn.Sequential(Tanh(), Tanh(), Calls(), Tanh()), "attribute 'calls' of module '2'"),
        (lambda: nn.Sequential(Tanh(), nn.BatchNorm1d(WIDTH), Tanh()), "buffer '1.num_batches_tracked'"),
    ],
)
def test_state_is_refused_by_name(build, name) -> None:
    x, _ = data(8)
    with pytest.raises(fxchimera.FxChimeraError, match=f"{name} is written in forward, but the order"):
        wrapped(seeded(build), x, num_stages=2, n_microbatches=4, schedule=descending)
