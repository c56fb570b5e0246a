"""A value that a stage reads, passes on, and has close relatives of written in place: sums of gradients associate as in eager."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.local.toys import data, seeded
from tests.local.wrapped import reference, step, wrap
from tests.models import Example
from tests.parity import assert_bitwise

WIDTH = 24


class Layer(nn.Module):
    """Not one of torch's: nobody can tell from outside that its output is new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(x))


class Residual(nn.Module):
    """Writes ``x`` into what it computed from it, in place, as torchvision's MobileNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(*(Layer() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        result = self.block(x)
        result += x
        return result


class Skipping(nn.Module):
    """The value after ``first`` is read by the first residual block, twice, and by ``low``, three stages on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.low, self.high = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.blocks = nn.Sequential(*(Residual() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        high = self.high(self.blocks(x))
        return high + self.low(x)


def test_gradients_of_a_value_passed_on_are_added_in_eagers_order() -> None:
    """In float32, where another order shows; the cut that shows it is the one inside the last block, whose sum is written."""
    for seed in range(4):
        model = seeded(Skipping, seed).float()
        x, target = (tensor.float() for tensor in data(8, WIDTH))
        example = Example(model, (x,), {}, target, F.mse_loss)
        expected = reference(example, 1, 2, "gpipe")
        model.zero_grad()
        with wrap(example, 4, 2, "1f1b", split_points=["blocks.0", "blocks.2.block.2", "high"]) as pipe:
            stages = pipe.plan.stages
            assert {value.name for value in stages[1].received} < {value.name for value in stages[1].sent}
            assert_bitwise(step(pipe, example), expected)
