"""A backward in two parts has the bits of the whole one, operator by operator; the oracle is torch's own backward, undivided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from tests.local.divided import assert_same_bits, divided, in_parts, whole

WIDTH = 6

Body = Callable[[Any, Tensor], Tensor]


class Call(nn.Module):
    """A module that applies ``body(self, x)``, with the given parameters and children."""

    def __init__(self, body: Body, shapes: dict[str, tuple[int, ...]] | None = None, **children: nn.Module) -> None:
        super().__init__()
        self.body = body
        for name, shape in (shapes or {}).items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class Scale(torch.autograd.Function):
    """A custom Function with a parameter: no function mode sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(tuple(range(x.dim() - weight.dim())))


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


def square(name: str = "w") -> dict[str, tuple[int, ...]]:
    return {name: (WIDTH, WIDTH)}


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


ROWS, FLAT, IMAGE, IDS = (4, 3, WIDTH), (5, WIDTH), (2, 4, 7, 7), "ids"

# name -> (module, shape of a micro-batch, names of the parameters whose gradients come with W)
OPERATORS: dict[str, tuple[Callable[[], nn.Module], Any, str | None]] = {
    "linear": (linear, ROWS, "weight bias"),
    "linear, flat": (linear, FLAT, "weight bias"),
    "linear, vector": (linear, (WIDTH,), "weight bias"),
    "linear, no bias": (lambda: nn.Linear(WIDTH, 5, bias=False), ROWS, "weight"),
    "linear, transposed input": (lambda: Call(lambda m, x: m.a(x.transpose(0, 1)), a=linear()), ROWS, "a.weight a.bias"),
    "linear, expanded gradient": (lambda: Call(lambda m, x: m.a(x).sum(1), a=linear()), ROWS, "a.weight a.bias"),
    "linear, transposed gradient": (lambda: Call(lambda m, x: m.a(x).transpose(0, 2), a=linear()), ROWS, "a.weight a.bias"),
    "linear, written over": (lambda: Call(lambda m, x: m.a(x).mul_(2).relu_(), a=linear()), ROWS, "a.weight a.bias"),
    "linear, flat, written over": (lambda: Call(lambda m, x: m.a(x).mul_(2).relu_(), a=linear()), FLAT, "a.weight a.bias"),
    "conv 1, written over": (lambda: nn.Sequential(nn.Conv1d(3, 5, 2), nn.ReLU(inplace=True)), (4, 3, 8), "0.weight 0.bias"),
    "linear, keywords": (lambda: Call(lambda m, x: F.linear(input=x, weight=m.w), square()), ROWS, "w"),
    "frozen weight": (lambda: frozen(linear(), "weight"), ROWS, ""),
    "frozen bias": (lambda: frozen(linear(), "bias"), ROWS, "weight"),
    "frozen": (lambda: frozen(linear(), "weight", "bias"), ROWS, ""),
    "embedding": (lambda: nn.Embedding(9, WIDTH, padding_idx=1), IDS, "weight"),
    "embedding, scaled": (lambda: nn.Embedding(9, WIDTH, scale_grad_by_freq=True), IDS, "weight"),
    "embeddings, summed": (lambda: nn.EmbeddingBag(9, WIDTH, mode="sum"), IDS, "weight"),
    "embeddings, summed, sparse": (lambda: nn.EmbeddingBag(9, WIDTH, mode="sum", sparse=True), IDS, ""),
    "embedding, sparse": (lambda: nn.Embedding(9, WIDTH, sparse=True), IDS, ""),
    "embedding, renormalised": (lambda: nn.Embedding(9, WIDTH, max_norm=1.0), IDS, ""),
    "conv 1": (lambda: nn.Conv1d(3, 5, 2), (4, 3, 8), "weight bias"),
    "conv 2": (lambda: nn.Conv2d(4, 6, 3, padding=1, stride=2), IMAGE, "weight bias"),
    "conv 2, groups": (lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), IMAGE, "weight"),
    "conv 2, reflected": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), IMAGE, "weight bias"),
    "conv 3": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4), "weight bias"),
    "conv 2, transposed": (lambda: nn.ConvTranspose2d(4, 3, 3), IMAGE, "weight bias"),
    "conv 1, transposed": (lambda: nn.ConvTranspose1d(3, 5, 2, stride=2, bias=False), (4, 3, 8), "weight"),
    "conv 3, transposed": (lambda: nn.ConvTranspose3d(2, 3, 2), (2, 2, 4, 4, 4), "weight bias"),
    "conv 2, one image": (lambda: nn.Conv2d(4, 6, 3, padding="same", dilation=2), IMAGE[1:], "weight bias"),
    "conv 2, channels last": (lambda: Call(lambda m, x: m.a(x.to(memory_format=torch.channels_last)), a=nn.Conv2d(4, 6, 3)), IMAGE,
                              "a.weight a.bias"),
    "addmm": (lambda: Conv1D(5, WIDTH), ROWS, "weight bias"),
    "matmul": (lambda: Call(lambda m, x: torch.matmul(x, m.w), square()), ROWS, "w"),
    "matmul, from the left": (lambda: Call(lambda m, x: m.w @ x, {"w": (3, 4)}), (2, 4, 5), "w"),
    "operator @": (lambda: Call(lambda m, x: x @ m.w, square()), ROWS, "w"),
    "mm": (lambda: Call(lambda m, x: x.mm(m.w), square()), FLAT, "w"),
    "bmm": (lambda: Call(lambda m, x: torch.bmm(x, m.w), {"w": (4, WIDTH, 2)}), ROWS, "w"),
    "baddbmm": (lambda: Call(lambda m, x: torch.baddbmm(m.b, x, m.w), {"w": (4, WIDTH, 2), "b": (4, 3, 2)}), ROWS, "w b"),
    "einsum": (lambda: Call(lambda m, x: torch.einsum("bld,dhe->blhe", x, m.w), {"w": (WIDTH, 2, 3)}), ROWS, "w"),
    "einsum, from the left": (lambda: Call(lambda m, x: torch.einsum("ed,bld->ble", m.w, x), square()), ROWS, "w"),
    "tensordot": (lambda: Call(lambda m, x: torch.tensordot(x, m.w, dims=1), square()), ROWS, "w"),
    "bilinear": (lambda: Call(lambda m, x: m.a(x, x.tanh()), a=nn.Bilinear(WIDTH, WIDTH, 3)), ROWS, "a.weight a.bias"),
    "layer norm": (lambda: nn.LayerNorm(WIDTH), ROWS, ""),
    "group norm": (lambda: nn.GroupNorm(2, 4), IMAGE, ""),
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True)), IMAGE, "0.weight 0.bias"),
    "attention": (lambda: Call(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(WIDTH, 2, batch_first=True)), ROWS,
                  "a.in_proj_weight a.in_proj_bias a.out_proj.weight a.out_proj.bias"),
    "attention across": (lambda: Call(lambda m, x: m.a(x, x * 2, x * 2)[0], a=nn.MultiheadAttention(WIDTH, 2)), ROWS,
                         "a.in_proj_weight a.in_proj_bias a.out_proj.weight a.out_proj.bias"),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True), ROWS,
                      "self_attn.in_proj_weight self_attn.in_proj_bias self_attn.out_proj.weight self_attn.out_proj.bias "
                      "linear1.weight linear1.bias linear2.weight linear2.bias"),
    "recurrent": (lambda: Call(lambda m, x: m.b(m.a(x)[0]), a=nn.LSTM(WIDTH, WIDTH), b=linear()), ROWS, "b.weight b.bias"),
}  # fmt: skip


def quiet(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return module(x)


def slope(module: nn.Module, x: Tensor) -> Tensor:
    y = module(x).tanh().sum()
    return torch.autograd.grad(y, x, create_graph=True)[0]


def one(body: Body) -> Callable[[], nn.Module]:
    return lambda: Call(body, a=linear())


def two(body: Body) -> Callable[[], nn.Module]:
    return lambda: Call(body, a=linear(), b=linear())


USES: dict[str, tuple[Callable[[], nn.Module], Any, str | None]] = {
    "called twice": (one(lambda m, x: m.a(m.a(x).tanh())), ROWS, "a.weight a.bias"),
    "three branches": (one(lambda m, x: m.a(x) + x * m.a(x.tanh()) + m.a(x.exp())), ROWS, "a.weight a.bias"),
    "tied": (lambda: Call(lambda m, x: F.linear(m.a(x).tanh(), m.a.weight), a=nn.Embedding(9, WIDTH)), IDS, "a.weight"),
    "also scaled by hand": (one(lambda m, x: m.a(x) * m.a.bias + m.a(x.tanh())), ROWS, ""),
    "also its view": (one(lambda m, x: m.a(x) + F.linear(x, m.a.weight.t()) + m.a(x.tanh())), ROWS, "a.weight a.bias"),
    "also its slice by hand": (one(lambda m, x: m.a(x) + F.linear(x, m.a.weight.t()) * m.a.weight[0]), ROWS, ""),
    "also a custom Function": (one(lambda m, x: m.a(Scale.apply(m.a(x), m.a.bias))), ROWS, ""),
    "spoiled by a neighbour": (lambda: Call(lambda m, x: F.linear(x, m.w, m.b) + F.linear(x, m.v, m.b) * m.v[0],
                                            {"w": (6, 6), "v": (6, 6), "b": (6,)}), ROWS, ""),
    "residual": (two(lambda m, x: x + m.a(x) + m.b(x + m.a(x))), ROWS, "a.weight a.bias b.weight b.bias"),
    "no gradient wanted there": (two(lambda m, x: m.b(x) + m.a(x).detach() + quiet(m.b, x)), ROWS, "b.weight b.bias"),
    "checkpointed": (two(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False))), ROWS, "b.weight b.bias"),
    "checkpointed, reentrant": (two(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=True))), ROWS, "b.weight b.bias"),
    "checkpointed and not": (one(lambda m, x: m.a(checkpoint(m.a, m.a(x), use_reentrant=False))), ROWS, ""),
    "checkpointed and not, reentrant": (one(lambda m, x: m.a(checkpoint(m.a, m.a(x), use_reentrant=True))), ROWS, ""),
    "its own gradient": (two(lambda m, x: m.b(slope(m.a, x))), ROWS, ""),
    "vmap": (two(lambda m, x: m.b(torch.vmap(m.a)(x))), ROWS, "b.weight b.bias"),
    "compiled": (two(lambda m, x: m.b(torch.compile(m.a, backend="eager")(x))), ROWS, None),
    "scripted": (lambda: Call(lambda m, x: m.b(m.a(x)), a=torch.jit.script(linear()), b=linear()), ROWS, "b.weight b.bias"),
}  # fmt: skip


# Two operators share a parameter, or torch allows whole backwards alone: what is put off in the first micro-batch.
WHOLE_AT_FIRST = {
    "attention across": "a.out_proj.weight a.out_proj.bias",
    "residual": "b.weight b.bias",
    **dict.fromkeys(("called twice", "three branches", "tied", "also its view", "checkpointed, reentrant"), ""),
}


def maker(build: Callable[[], nn.Module], dtype: torch.dtype) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return build().to(dtype).train()

    return make


def inputs(shape: Any, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    if shape == IDS:
        return [torch.randint(0, 9, (4, 3), generator=generator) for _ in range(3)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", [*OPERATORS, *USES])
def test_two_parts_have_the_bits_of_the_whole(name: str, dtype: torch.dtype) -> None:
    """Three micro-batches, the weight parts in descending order; the parameters that are put off are the expected ones."""
    build, shape, deferred = (OPERATORS | USES)[name]
    make, batches = maker(build, dtype), inputs(shape, dtype)
    ours = divided(make, batches)
    assert_same_bits(ours, whole(make, batches))
    if deferred is not None:
        assert ours.deferred == set(deferred.split())
        assert ours.first == set(WHOLE_AT_FIRST.get(name, deferred).split())


@pytest.mark.parametrize("name", [*OPERATORS, *USES])
def test_w_and_nothing_else_brings_what_waits(name: str) -> None:
    """I leaves ``.grad`` of every parameter that waits as it was, and finishes all others; W brings the rest and only the rest."""
    build, shape, deferred = (OPERATORS | USES)[name]
    make, (x, *_) = maker(build, torch.float32), inputs(shape, torch.float32)
    early, late = in_parts(make, x)
    expected = whole(make, [x])
    if deferred is not None:
        assert early.deferred == set(deferred.split())
    assert all(early.parameters[waiting] is None for waiting in early.deferred)
    finished = {name: gradient for name, gradient in expected.parameters.items() if name not in early.deferred}
    assert_same_bits(early, replace(expected, parameters=finished))
    assert_same_bits(late, expected)


@pytest.mark.parametrize("name", [name for name in (*OPERATORS, *USES) if name not in ("compiled", "vmap", "recurrent")])
def test_under_autocast_too(name: str) -> None:
    """Casts of weights are shared between the uses of a region, casts of inputs are not."""
    build, shape, _ = (OPERATORS | USES)[name]
    make, batches = maker(build, torch.float32), inputs(shape, torch.float32)

    def autocast() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    assert_same_bits(divided(make, batches, autocast), whole(make, batches, autocast))


def test_complex_weights() -> None:
    make = maker(lambda: Call(lambda m, x: x @ m.w, square()), torch.complex64)
    batches = inputs(ROWS, torch.complex64)
    ours = divided(make, batches)
    assert ours.deferred == {"w"}
    assert_same_bits(ours, whole(make, batches))
