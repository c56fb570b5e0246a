"""A model that is changed between two steps of its pipeline, and the plain model, changed alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F

from tests.local.toys import data, plain, wrapped
from tests.parity import Outcome, assert_close, gradients_of

__all__ = ["BOTH", "check"]

BOTH = pytest.mark.parametrize("schedule", ["chimera", "1f1b"])


def check(build: Callable[[], Any], change: Callable[[Any], object], schedule: str = "chimera", **options: Any) -> None:
    """Wrap, change the model, step; the plain model, changed alike, is the witness."""
    x, y = data(8)
    model, reference = build(), build()
    with wrapped(model, x, num_stages=4, n_microbatches=4, schedule=schedule, **options) as pipe:
        pipe.step(x, target=y)
        model.zero_grad()
        change(model)
        found = Outcome(pipe.step(x, target=y), gradients_of(model))
    change(reference)
    assert_close(found, plain(reference, lambda m: F.mse_loss(m(x), y)), 1e-12)
