"""Weights that are made of parameters wait for W with them; what is made of anything else flows with I as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.local.divided import assert_same_bits, divided, in_parts, whole
from tests.local.test_deferred import FLAT, IDS, IMAGE, ROWS, WIDTH, Call, Scale, frozen, inputs, linear, maker, square

EXPERTS = (3, WIDTH, WIDTH)


class Rounded(torch.autograd.Function):
    """A weight rounded to quarters, its gradient passed straight through: what training for a quantised model does."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return (weight * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Standardised(nn.Conv2d):
    """A convolution whose filters have mean 0 and variance 1, as of residual networks without batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.flatten(1)
        weight = F.batch_norm(flat[None], None, None, training=True).view_as(self.weight)
        return F.conv2d(x, weight, self.bias, padding=1)


class Normed(nn.Module):
    """A linear layer with each row of its weight scaled to the length ``g``, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.g, self.bias = linear().weight, nn.Parameter(torch.rand(WIDTH, 1)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.g * self.v / self.v.norm(dim=1, keepdim=True), self.bias)


def experts(m: Any, x: Tensor) -> Tensor:
    """Every row goes through one expert; their weights lie in one stack."""
    rows = [F.linear(x[:, i], m.w[i]) for i in range(3)]
    return torch.stack(rows, 1)


def gathered(m: Any, x: Tensor) -> Tensor:
    return torch.bmm(x, m.w[torch.tensor([0, 2, 1, 0])])


def low_rank(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.frozen) + F.linear(F.linear(x, m.down), m.up)


def queried(m: Any, x: Tensor) -> Tensor:
    return torch.softmax(m.a(m.q[None] * 2) @ x.transpose(1, 2), -1) @ x


def dropped(m: Any, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return F.linear(x, m.w * (torch.rand(m.w.shape, generator=generator) > 0.3))


def twice(m: Any, x: Tensor) -> Tensor:
    w = m.w.t().contiguous()
    return (x @ w).tanh() @ w


def also_by_hand(m: Any, x: Tensor) -> Tensor:
    w = m.w * 2
    return F.linear(x, w, m.b) + F.linear(x, m.v) * w[0]


def hyper(m: Any, x: Tensor) -> Tensor:
    """A weight that is computed from the input: its gradient is one of I."""
    return F.linear(x, m.w * x.mean())


def sparse_first(m: Any, x: Tensor) -> Tensor:
    h = m.e(x)
    return h + F.linear(h, m.w.t())


def head(m: Any, x: Tensor) -> Tensor:
    return F.linear(m.e(x).tanh(), m.e.weight * 0.5)


SHARED = ("weight norm, cached", "experts", "used twice", "tied, made")  # by two operators: whole in the first micro-batch
NORMED = "parametrizations.weight.original0 parametrizations.weight.original1 bias"

MADE: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "weight norm": (lambda: parametrizations.weight_norm(linear()), ROWS, NORMED),
    "weight norm of a convolution": (lambda: parametrizations.weight_norm(nn.Conv1d(3, 5, 2)), (4, 3, 8), NORMED),
    "weight norm, as a hook": (lambda: nn.utils.weight_norm(linear()), ROWS, "weight_g weight_v bias"),
    "weight norm, written out": (Normed, ROWS, "v g bias"),
    "weight norm, frozen": (lambda: frozen(parametrizations.weight_norm(linear()), *NORMED.split()[:2]), ROWS, ""),
    "spectral norm": (lambda: parametrizations.spectral_norm(linear()), ROWS, "parametrizations.weight.original bias"),
    "weight norm, cached": (lambda: Call(lambda m, x: cached(m, x), a=parametrizations.weight_norm(linear())), ROWS,
                            " ".join(f"a.{name}" for name in NORMED.split())),
    "standardised filters": (lambda: Standardised(4, 4, 3), IMAGE, "weight bias"),
    "transposed": (lambda: Call(lambda m, x: x @ m.w.t(), square()), ROWS, "w"),
    "from the left": (lambda: Call(lambda m, x: m.w.t() @ x, {"w": (3, 4)}), (2, 3, 5), "w"),
    "masked": (lambda: Call(lambda m, x: F.linear(x, m.w.tril(), m.b), {**square(), "b": (WIDTH,)}), ROWS, "w b"),
    "masked at random": (lambda: Call(dropped, square()), ROWS, "w"),
    "experts": (lambda: Call(experts, {"w": EXPERTS}), ROWS, "w"),
    "experts, gathered": (lambda: Call(gathered, {"w": EXPERTS}), ROWS, "w"),
    "low rank beside a frozen weight": (lambda: frozen(Call(low_rank, {"frozen": (6, 6), "down": (2, 6), "up": (6, 2)}), "frozen"),
                                        ROWS, "down up"),
    "product of parameters": (lambda: Call(lambda m, x: F.linear(x, m.u @ m.d), {"d": (2, 6), "u": (6, 2)}), ROWS, "d u"),
    "learned queries": (lambda: Call(queried, {"q": (2, WIDTH)}, a=linear()), ROWS, "a.weight a.bias"),
    "quantised": (lambda: Call(lambda m, x: F.linear(x, Rounded.apply(m.w)), square()), ROWS, "w"),
    "quantised, a Function of both": (lambda: Call(lambda m, x: Scale.apply(x, m.w), {"w": (WIDTH,)}), ROWS, ""),
    "used twice": (lambda: Call(twice, square()), ROWS, "w"),
    "also by hand": (lambda: Call(also_by_hand, {**square(), "v": (6, 6), "b": (6,)}), ROWS, "v"),
    "made of the input too": (lambda: Call(hyper, square()), ROWS, ""),
    "with a sparse embedding": (lambda: Call(sparse_first, square(), e=nn.Embedding(9, WIDTH, sparse=True)), IDS, ""),
    "tied, made": (lambda: Call(head, e=nn.Embedding(9, WIDTH)), IDS, "e.weight"),
    "long way from the parameter": (lambda: Call(lambda m, x: F.linear(x, far(m.w)), square()), FLAT, ""),
}  # fmt: skip


def cached(m: Any, x: Tensor) -> Tensor:
    with parametrize.cached():
        return m.a(m.a(x).tanh())


def far(w: Tensor) -> Tensor:
    for _ in range(40):
        w = w * 1.01
    return w


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", MADE)
def test_two_parts_have_the_bits_of_the_whole(name: str, dtype: torch.dtype) -> None:
    build, shape, deferred = MADE[name]
    make, batches = maker(build, dtype), inputs(shape, dtype)
    ours = divided(make, batches)
    assert_same_bits(ours, whole(make, batches))
    assert ours.deferred == set(deferred.split())
    assert ours.first == (set() if name in SHARED else ours.deferred)


@pytest.mark.parametrize("name", MADE)
def test_w_brings_what_waits(name: str) -> None:
    build, shape, deferred = MADE[name]
    make, (x, *_) = maker(build, torch.float32), inputs(shape, torch.float32)
    early, late = in_parts(make, x)
    assert early.deferred == set(deferred.split())
    assert all(early.parameters[waiting] is None for waiting in early.deferred)
    assert_same_bits(late, whole(make, [x]))


@pytest.mark.parametrize("name", MADE)
def test_under_autocast_too(name: str) -> None:
    build, shape, _ = MADE[name]
    make, batches = maker(build, torch.float32), inputs(shape, torch.float32)

    def autocast() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    assert_same_bits(divided(make, batches, autocast), whole(make, batches, autocast))


def test_grouped_products() -> None:
    """The experts of a mixture in one operator: bfloat16, rows of 16 bytes."""

    def product(m: Any, x: Tensor) -> Tensor:
        ends = torch.tensor([3, 5, 16], dtype=torch.int32)
        return F.grouped_mm(x, m.w.transpose(-2, -1), offs=ends)

    make = maker(lambda: Call(product, {"w": (3, 8, 16)}), torch.bfloat16)
    batches = inputs((16, 16), torch.bfloat16)
    ours = divided(make, batches)
    assert ours.deferred == {"w"}
    assert_same_bits(ours, whole(make, batches))
