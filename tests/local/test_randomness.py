"""What is drawn at random is named: the same for every number of stages, order and direction, split backwards included.

The loss of a step hangs on every draw of every micro-batch, so losses are compared by their bits; gradients with the plain model's
under the same names, in the order of summation of the schedule.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.local.toys import WIDTH, data, seeded
from tests.local.wrapped import reference, step, wrap
from tests.models import Example
from tests.parity import Outcome, assert_bitwise
from tests.random_models import BLOCKS, chain_of, steps, unsaved

pytestmark = pytest.mark.filterwarnings("ignore:.*(was run on real tensors|None of the inputs have)")

N = 4
WHOLE = ((1, "1f1b"), (2, "chimera"), (4, "1f1b"), (4, "chimera"))
SPLIT = ((2, "zb-h1"), (2, "zbv"), (2, "auto"), (4, "zb-h1"), (4, "zbv"), (4, "auto"))
SLOW = ("gru", "encoder layer", "checkpoint of attention")  # to record, and each like another one
SLOWER = ("lstm", "multi-head attention")


def cells() -> list[Any]:
    """All combinations; of most kinds one with whole and one with split backwards, in turns, run by default."""
    found = []
    for i, kind in enumerate(BLOCKS):
        chosen = [] if kind in SLOW else [SPLIT[i % len(SPLIT)]]
        if kind not in (*SLOW, *SLOWER):
            chosen.append(WHOLE[i % len(WHOLE)])
        found += [pytest.param(kind, *c, marks=() if c in chosen else pytest.mark.matrix) for c in (*WHOLE, *SPLIT)]
    return found


@functools.cache
def plain(kind: str, stages: int = 1, schedule: str = "gpipe") -> Outcome:
    return reference(chain_of(kind, 2 * N), stages, N, schedule)


@pytest.mark.parametrize(("kind", "stages", "schedule"), cells())
def test_draws_do_not_depend_on_how_the_model_is_run(kind: str, stages: int, schedule: str) -> None:
    first, second = steps(kind, stages, N, schedule)
    assert torch.equal(first.loss, plain(kind).loss)
    assert not torch.equal(first.loss, second.loss), "another step must draw other numbers"
    assert_bitwise(first, plain(kind, stages, schedule))


@pytest.mark.parametrize(("kind", "schedule"), [("checkpoint", "chimera"), ("checkpoint, reentrant", "zbv")])
def test_computing_again_draws_again_what_was_drawn(kind: str, schedule: str) -> None:
    """The same model, its blocks not checkpointed, is the oracle: names of draws are those of the modules."""
    found = steps(kind, 2, N, schedule)[0]
    example = chain_of(kind, 2 * N)
    unsaved(example.model)
    assert_bitwise(found, reference(example, 2, N, schedule))


class LayersLeftOut(nn.Module):
    """Eight layers, each left out with a probability of 0.4 by the model's own forward."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layers, self.draw = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8)), draw

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or self.draw() >= 0.4:
                x = x + torch.tanh(layer(x))
        return x


@pytest.mark.filterwarnings("ignore:.*(is recorded anew|has been recorded)")
@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: np.random.uniform(0, 1)], ids=["python", "numpy"])
def test_layers_left_out_by_the_hosts_generators(draw: Callable[[], float]) -> None:
    """Every micro-batch takes its own path through the stages, some of which then have nothing to do."""
    model = seeded(lambda: LayersLeftOut(draw))
    x, target = data(2 * N, WIDTH)
    example = Example(model, (x,), {}, target, F.mse_loss)
    losses = [reference(example, 1, N, "gpipe", step=number).loss for number in range(3)]
    with wrap(example, 4, N, "zb-h1") as pipe:
        for number, loss in enumerate(losses):
            model.zero_grad()
            found = step(pipe, example)
            assert torch.equal(found.loss, loss)
            assert_bitwise(found, reference(example, 4, N, "zb-h1", step=number))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch": lambda output, target: F.mse_loss(F.dropout(output, 0.5), target),
    "python": lambda output, target: F.mse_loss(output * random.uniform(0.5, 1.5), target),
    "torch and numpy": lambda output, target: F.mse_loss(output + torch.randn_like(output) * np.random.rand(), target),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_draws(kind: str) -> None:
    """Its draws have names too, on whatever rank and thread it is computed; no two micro-batches draw the same."""
    x, target = (torch.ones(2 * N, WIDTH, dtype=torch.float64) for _ in range(2))
    example = Example(seeded(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))), (x,), {}, target, LOSSES[kind])
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    first = reference(example, 1, N, "gpipe")
    one = example._replace(args=(x[:2],), target=target[:2])
    assert not torch.equal(first.loss, reference(one, 1, 1, "gpipe").loss), "four equal micro-batches draw four times"
    for stages, schedule in ((2, "chimera"), (4, "chimera"), (2, "zbv"), (4, "zb-h1")):
        example.model.zero_grad()
        with wrap(example, stages, N, schedule) as pipe:
            found = step(pipe, example)
        assert torch.equal(found.loss, first.loss)
        assert_bitwise(found, reference(example, stages, N, schedule))
    now = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    assert torch.equal(now[0], states[0])
    assert now[1:] == states[1:]


def test_the_users_generators_stay_where_they_are() -> None:
    """Torch's, Python's and numpy's: a step draws from named ones, in whatever thread it runs."""
    torch.manual_seed(4)
    random.seed(5)
    np.random.seed(6)
    expected = torch.rand(3), random.random(), float(np.random.rand())
    torch.manual_seed(4)
    random.seed(5)
    np.random.seed(6)
    steps("all together", 2, N, "zbv")
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), float(np.random.rand())) == expected[1:]
