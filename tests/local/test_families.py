"""Every family with whole backwards trains the plain model; those that split backwards are refused before anything runs."""

from __future__ import annotations

import copy

import pytest
import torch

import fxchimera
from fxchimera.schedule.action import Kind
from fxchimera.schedule.families import make_order, schedules
from tests.models import MODELS

RANKS, MICROBATCHES = 4, 8


def splits(name: str) -> bool:
    return any(action.kind in (Kind.I, Kind.W) for _, action in make_order(name, RANKS, MICROBATCHES))


@pytest.mark.parametrize("name", sorted(name for name in schedules() if not splits(name)))
def test_whole_backwards_train_the_plain_model(name: str) -> None:
    """A tied model, uneven micro-batches: the full batch's gradients within 1e-12, two and more replicas or stages a rank."""
    example = MODELS["tied"](dtype=torch.float64, batch=2 * MICROBATCHES + 1)
    plain = copy.deepcopy(example.model)
    example.loss(plain(*example.args, **example.kwargs)).backward()
    with fxchimera.pipeline(
        example.model,
        example_args=example.args,
        example_kwargs=example.kwargs,
        loss_fn=example.loss_fn,
        num_stages=RANKS,
        n_microbatches=MICROBATCHES,
        schedule=name,
    ) as pipe:
        pipe.step(*example.args, target=example.target, **example.kwargs)
        verification = pipe.verify(*example.args, target=example.target, **example.kwargs)
    assert verification.bitwise
    for ours, theirs in zip(example.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", sorted(name for name in schedules() if splits(name)))
def test_split_backwards_are_refused_at_wrap(name: str) -> None:
    """The runtime has no I and W: the error names the order and one of its actions."""
    example = MODELS["mlp"](batch=MICROBATCHES)
    with pytest.raises(fxchimera.ScheduleError, match=rf"{name}.*splits backwards.*\d[IW]\d"):
        fxchimera.pipeline(
            example.model,
            example_args=example.args,
            loss_fn=example.loss_fn,
            num_stages=RANKS,
            n_microbatches=MICROBATCHES,
            schedule=name,
        )
