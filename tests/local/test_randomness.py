"""What is drawn at random is named: the same for every number of stages, order and direction, split backwards included.

The loss of a step hangs on every draw of every micro-batch, so losses are compared by their bits; gradients with the plain model's
under the same names, in the order of summation of the schedule.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.local.wrapped import reference
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
