"""Split backwards in the pipeline: what of a model's weights waits for W, and that every bit is the plain model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.local.divided import waiting_for_w
from tests.local.toys import data, seeded
from tests.local.wrapped import reference, step, wrap
from tests.models import Example
from tests.parity import assert_bitwise

WIDTH, N, STAGES = 6, 4, 2


class Block(nn.Module):
    """``x + tanh(run(x))`` of a child; a hook keeps it one call."""

    def __init__(self, child: nn.Module, run: Callable[[nn.Module, Tensor], Tensor] = lambda child, x: child(x)) -> None:
        super().__init__()
        self.child, self.run = child, run
        self.register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.run(self.child, x))


class Experts(nn.Module):
    """Each row is multiplied by one expert's matrix of a stack, the third expert's by nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, WIDTH, WIDTH)), nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        parts = [F.linear(part, self.weight[i], self.bias[i]) for i, part in enumerate(x.chunk(2, -2))]
        return torch.cat(parts, -2)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def without_bias(layer: nn.Linear) -> nn.Linear:
    layer.bias.requires_grad_(False)
    return layer


# the child of a block, how it is run, and which of its parameters wait for W in each of two steps
MODELS: dict[str, tuple[Callable[[], nn.Module], Any, set[str]]] = {
    "linear": (linear, None, {"weight", "bias"}),
    "frozen bias": (lambda: without_bias(linear()), None, {"weight"}),
    "frozen": (lambda: linear().requires_grad_(False), None, set()),
    "weight norm": (lambda: parametrizations.weight_norm(linear()), None,
                    {"parametrizations.weight.original0", "parametrizations.weight.original1", "bias"}),
    "experts": (Experts, None, {"weight", "bias"}),
    "norm": (lambda: nn.Sequential(nn.LayerNorm(WIDTH), linear()), None, {"1.weight", "1.bias"}),
    "lstm": (lambda: nn.LSTM(WIDTH, WIDTH), lambda child, x: child(x)[0], set()),
    "checkpointed": (linear, lambda child, x: checkpoint(child, x, use_reentrant=False), set()),
    "used twice": (linear, lambda child, x: child(child(x).sin()), {"weight", "bias"}),
    "attention": (lambda: nn.MultiheadAttention(WIDTH, 2), lambda child, x: child(x, x, x, need_weights=False)[0],
                  {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}),
}  # fmt: skip


def example_of(kind: str) -> Example:
    """A linear layer and a block, four times, and one batch of (row, position, width)."""
    build, run, _ = MODELS[kind]
    blocks = [linear, lambda: Block(build(), run) if run else Block(build())] * 4
    x, target = data(2 * N, 2, WIDTH)
    return Example(seeded(lambda: nn.Sequential(*(make() for make in blocks))), (x,), {}, target, F.mse_loss)


def in_float32(example: Example) -> Example:
    assert example.target is not None
    return example._replace(model=example.model.float(), args=(example.args[0].float(),), target=example.target.float())


@pytest.mark.parametrize("kind", MODELS)
def test_what_waits_for_w(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of ZBV, where every replica is the user's own: the second adds to the first one's gradients."""
    example, expected = example_of(kind), MODELS[kind][2]
    plain = [reference(example_of(kind), STAGES, N, "zbv", step=number) for number in range(2)]
    waited = waiting_for_w(monkeypatch)
    names = {id(parameter): name for name, parameter in example.model.named_parameters()}
    with wrap(example, STAGES, N, "zbv") as pipe:
        assert_bitwise(step(pipe, example), plain[0])
        example.model.zero_grad()
        assert_bitwise(step(pipe, example), plain[1])
    found = {names[one] for ids in waited for one in ids}
    assert found == {f"{i}.{name}" for i in range(0, 8, 2) for name in ("weight", "bias")} | {
        f"{i}.child.{name}" for i in range(1, 8, 2) for name in expected
    }


@pytest.mark.parametrize(("kind", "mode"), [("weight norm", "full"), ("attention", "selective")])
def test_where_a_stage_is_computed_again(kind: str, mode: str) -> None:
    """The second run gives I and W what the first one did not keep."""
    example = example_of(kind)
    with wrap(example, STAGES, N, "zbv", recompute=mode) as pipe:
        found = step(pipe, example)
    assert_bitwise(found, reference(example_of(kind), STAGES, N, "zbv"))


@pytest.mark.parametrize("kind", ["linear", "weight norm", "attention"])
@pytest.mark.parametrize("schedule", ["zb-h1", "dualpipe"])
def test_under_autocast_with_one_and_two_copies(kind: str, schedule: str) -> None:
    """bfloat16 inside the step as inside the plain model; gradients of the float32 weights."""
    example, other = (in_float32(example_of(kind)) for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = reference(other, STAGES, N, schedule)
        with wrap(example, STAGES, N, schedule) as pipe:
            found = step(pipe, example)
    assert_bitwise(found, plain)
