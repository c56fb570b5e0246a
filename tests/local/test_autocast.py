"""Mixed precision: ``torch.autocast`` around the calls, and inside the model, whole and split backwards.

The bar for bfloat16 against the plain full-batch step is 5e-2 of each gradient's norm; against the plain loop over micro-batches,
which makes the same casts, float32's.  Batch norm has the statistics of micro-batches, so there is no full-batch step for it.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.local.wrapped import reference, step, wrap
from tests.models import MODELS, Example, seeded
from tests.parity import TOLERANCE, Outcome, assert_bitwise, assert_close, gradients_of, split

WIDTH, STAGES, N = 8, 4, 4
BARS = {torch.bfloat16: 5e-2, torch.float16: 1e-2}

Region = Callable[[], AbstractContextManager[Any]]


def bfloat16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def plain_full(example: Example, region: Region) -> Outcome:
    with region():
        loss = example.loss(example.model(*example.args, **example.kwargs))
    loss.backward()
    return Outcome(loss.detach(), gradients_of(example.model))


def plain_loop(example: Example, region: Region, n: int = N) -> Outcome:
    """One region a micro-batch, its backward outside."""
    total = torch.zeros(())
    for piece in split(example, n):
        with region():
            loss = piece.loss(piece.model(*piece.args, **piece.kwargs)) / n
        loss.backward()
        total = total + loss.detach()
    return Outcome(total, gradients_of(example.model))


CELLS = [
    (2, "mlp", "chimera", torch.bfloat16), (2, "mlp", "zbv", torch.bfloat16), (2, "resnet", "zb-h1", torch.bfloat16),
    (4, "tied", "chimera", torch.bfloat16), (2, "skip", "1f1b", torch.float16),
]  # fmt: skip


def matrix() -> list[Any]:
    names = [name for name in MODELS if name != "masked_rotary"]  # the plain model cannot: its mask's value is float32's lowest
    cells = itertools.product((2, 4), names, ("chimera", "1f1b", "zb-h1", "zbv"), BARS)
    return [pytest.param(*cell, marks=pytest.mark.matrix) for cell in cells if cell not in CELLS]


@pytest.mark.parametrize(("stages", "name", "schedule", "dtype"), [*CELLS, *matrix()])
def test_steps_equal_the_plain_model_under_autocast(stages: int, name: str, schedule: str, dtype: torch.dtype) -> None:
    def region() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=dtype)

    with wrap(example := MODELS[name](batch=8), stages, N, schedule) as pipe, region():
        found = [step(pipe, example)]
        with torch.no_grad():  # as an optimizer would: the casts of the first step are out of date
            for parameter in pipe.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
        state = {key: value.clone() for key, value in example.model.state_dict().items()}
        found.append(step(pipe, example))
    same = MODELS[name](batch=8)
    for outcome in found:
        before = {key: value.clone() for key, value in same.model.state_dict().items()}
        with region():
            assert_bitwise(outcome, reference(same, stages, N, schedule))
        same.model.load_state_dict(before)
        assert_close(outcome, plain_loop(same, region), TOLERANCE[torch.float32])
        same.model.zero_grad()
        if name != "resnet":
            assert_close(outcome, plain_full(same, region), BARS[dtype], 1e-2)
            same.model.zero_grad()
        same.model.load_state_dict(state)


class Twice(nn.Module):
    """Reads its weight twice, with time between for the other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        time.sleep(0.002)
        return torch.tanh(self.linear(x)).float()


class Inside(Twice):
    """Has a region of its own."""

    def forward(self, x: Tensor) -> Tensor:
        with bfloat16():
            return super().forward(x)


class Again(Twice):
    """Runs its forward again in the backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Opened(nn.Module):
    """A region around layers that are recorded one by one, each used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(STAGES))

    def forward(self, x: Tensor) -> Tensor:
        with bfloat16():
            for layer in self.layers:
                x = torch.tanh(layer(torch.tanh(layer(x))))
        return x.float()


def chain(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), *(kind() for _ in range(STAGES)))


MIXED: dict[str, tuple[Callable[[], nn.Module], Region]] = {
    "twice": (chain(Twice), bfloat16),
    "inside": (chain(Inside), contextlib.nullcontext),
    "opened": (Opened, contextlib.nullcontext),
    "checkpoint": (chain(lambda: Again(False)), bfloat16),
    "old checkpoint": (chain(lambda: Again(True)), bfloat16),
}


@pytest.mark.filterwarnings("ignore:activation checkpointing")
@pytest.mark.parametrize(
    ("name", "schedule"), [*((name, "chimera") for name in MIXED), ("twice", "zbv"), ("opened", "zbv"), ("inside", "1f1b")]
)
def test_a_weight_that_is_read_twice_has_one_cast(name: str, schedule: str) -> None:
    """Whatever the other ranks do meanwhile: their regions end, and torch has one table of casts for all threads."""
    build, region = MIXED[name]

    def example() -> Example:
        with seeded(0) as data:
            model = build()
            x, y = (torch.randn(8, WIDTH, generator=data) for _ in range(2))
        return Example(model, (x,), {}, y, F.mse_loss)

    points = {"split_points": [f"{i + 1}" for i in range(1, STAGES)]} if name != "opened" and schedule != "zbv" else {}
    with region(), wrap(ours := example(), STAGES, N, schedule, **points) as pipe:
        found = []
        for _ in range(3):
            found.append(step(pipe, ours))
            ours.model.zero_grad()
    with region():
        expected = reference(example(), STAGES, N, schedule, **points)
    for outcome in found:
        assert_bitwise(outcome, expected)
    assert_close(found[0], plain_loop(example(), region), TOLERANCE[torch.float32] if points else BARS[torch.bfloat16])


def test_evaluation_and_outputs_are_those_of_the_plain_model() -> None:
    example = MODELS["vit"](batch=8)
    with wrap(example, 2, N) as pipe, bfloat16():
        loss, output = pipe.evaluate(target=example.target, **example.kwargs), pipe(**example.kwargs)
    with torch.no_grad(), bfloat16():
        expected = example.model.eval()(**example.kwargs)
        torch.testing.assert_close(loss, example.loss(expected), rtol=1e-2, atol=0.0)
    assert output.logits.dtype == expected.logits.dtype == torch.bfloat16
    torch.testing.assert_close(output.logits, expected.logits, rtol=5e-2, atol=5e-2)


def test_nothing_of_a_step_stays_in_the_table_of_casts() -> None:
    """Else the second step would read the weights of the first, and their memory would stay."""
    example = MODELS["mlp"](batch=8)
    with wrap(example, 2, 2) as pipe, bfloat16():
        step(pipe, example)
        first = next(pipe.parameters())
        with torch.no_grad():
            first.zero_()
        assert not F.linear(torch.ones(1, first.shape[1]), first).any()
