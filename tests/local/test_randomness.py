"""What is drawn at random is named: the same for every number of stages, order and direction, split backwards included.

The loss of a step tells every draw of every micro-batch, so losses are compared by their bits; gradients with the plain model's
under the same names, in the order of summation of the schedule.
"""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.local.wrapped import reference
from tests.parity import assert_bitwise
from tests.random_models import BLOCKS, chain_of, steps, unsaved

N = 4
CELLS = [(1, "1f1b"), (2, "chimera"), (2, "zbv"), (2, "zb-h1"), (2, "auto"), (4, "1f1b"), (4, "chimera"), (4, "zb-h1"), (4, "zbv"), (4, "auto")]


def cells() -> list[Any]:
    """All combinations; of each kind three, in turns, run by default: one with split backwards at least."""
    chosen = {(i, j) for i in range(len(BLOCKS)) for j in (i % 10, (i + 3) % 10, 2 if i % 2 else 7)}
    found = itertools.product(enumerate(BLOCKS), enumerate(CELLS))
    return [pytest.param(kind, *cell, marks=() if (i, j) in chosen else pytest.mark.matrix) for (i, kind), (j, cell) in found]


@functools.cache
def losses(kind: str) -> tuple[torch.Tensor, ...]:
    """The plain model's, micro-batch by micro-batch, of two steps."""
    return tuple(reference(chain_of(kind, 2 * N - 1), 1, N, "gpipe", step=number).loss for number in range(2))


@pytest.mark.parametrize(("kind", "stages", "schedule"), cells())
def test_draws_do_not_depend_on_how_the_model_is_run(kind: str, stages: int, schedule: str) -> None:
    found = steps(kind, stages, N, schedule)
    assert not torch.equal(found[0].loss, found[1].loss), "another step must draw other numbers"
    plain = chain_of(kind, 2 * N - 1)
    for number, outcome in enumerate(found):
        assert torch.equal(outcome.loss, losses(kind)[number])
        assert_bitwise(outcome, reference(plain, stages, N, schedule, step=number))
