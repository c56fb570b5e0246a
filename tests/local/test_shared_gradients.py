"""Gradients that autograd leaves on one memory: each parameter still gets its own sum over the micro-batches.

Plain torch's accumulation adds to both at once, so the witness is the plain full-batch step, one backward.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxchimera.runtime.stages.gradients import GradientSum, own_gradients
from tests.local.toys import WIDTH, data, plain, seeded, wrapped
from tests.local.wrapped import Outcome
from tests.parity import assert_close, gradients_of


class Sum(nn.Module):
    """A layer whose weight is the sum of two parameters, seen as one row each; and a bias that is a part of a longer row."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.whole, self.front, self.back = (nn.Parameter(torch.randn(n)) for n in (WIDTH, 2, WIDTH - 2))

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.a.view(-1) + self.b.view(-1)).view(WIDTH, WIDTH)
        return torch.tanh(F.linear(x, weight, self.whole.view(-1) + torch.cat([self.front, self.back])))


class Offset(nn.Module):
    """Adds a parameter of the input's own shape, so that the gradient that goes on is the parameter's too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, WIDTH) + self.weight.view(1, WIDTH)


def model(layer: type[nn.Module]) -> nn.Module:
    return seeded(lambda: nn.Sequential(*(layer() for _ in range(8))))


@pytest.mark.parametrize("schedule", ["1f1b", "chimera", "zbv", "dualpipe"])
@pytest.mark.parametrize("layer", [Sum, Offset])
def test_a_step_has_the_gradients_of_the_full_batch(layer: type[nn.Module], schedule: str) -> None:
    x, y = data(8)  # one row a micro-batch
    found, other = model(layer), model(layer)
    expected = plain(other, lambda m: F.mse_loss(m(x), y))
    with wrapped(found, x, num_stages=4, n_microbatches=8, schedule=schedule) as pipe:
        assert_close(Outcome(pipe.step(x, target=y), gradients_of(found)), expected, 1e-12)
        assert pipe.verify(x, target=y).bitwise


def test_only_gradients_on_shared_memory_are_copied() -> None:
    a, b, c = (nn.Parameter(torch.ones(4)) for _ in range(3))
    ((a.view(-1) + b.view(-1)) * c).sum().backward()
    assert a.grad.data_ptr() == b.grad.data_ptr(), "torch leaves two gradients on one memory"
    alone = c.grad
    own_gradients([a, b, c])
    assert a.grad.data_ptr() != b.grad.data_ptr()
    assert c.grad is alone
    assert torch.equal(a.grad, torch.ones(4))


def test_a_sum_is_made_in_place_only_where_nobody_looks() -> None:
    """The owner's gradient takes the mirror's in; a part of a message that holds others too is copied, not kept."""
    own, mirrors = torch.tensor([1.0, 2.0]), torch.tensor([4.0, 8.0])
    total = GradientSum({(0, 0): own, (1, 0): mirrors}).total()
    assert total is own
    assert torch.equal(own, torch.tensor([5.0, 10.0]))
    watched = torch.tensor([1.0, 2.0])
    seen = watched.view(2)
    assert torch.equal(GradientSum({(0, 0): watched, (1, 0): mirrors}).total(), torch.tensor([5.0, 10.0]))
    assert torch.equal(seen, torch.tensor([1.0, 2.0]))
    message = torch.arange(100.0)
    alone = GradientSum({(1, 0): message[10:12]}).total()
    assert torch.equal(alone, torch.tensor([10.0, 11.0]))
    assert alone.untyped_storage().nbytes() == 8
