"""Arguments and outputs that are no tensors: what differs in a way that no text shows is another recording."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from fxchimera import BatchError
from tests.local.toys import Tanh, data, plain, seeded, wrapped
from tests.parity import Outcome, assert_close, gradients_of


class Options:
    """Prints no better than any object."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(Tanh() for _ in range(4)))

    def forward(self, x: Tensor, options: Any) -> Tensor:
        factor = options.factor if isinstance(options, Options) else options(1.0) if callable(options) else float(options[50, 0])
        return self.body(x) * factor


def array(value: float) -> np.ndarray:
    """One value in the part of a large array that its text leaves out."""
    made = np.zeros((100, 100))
    made[50, 0] = value
    return made


@pytest.mark.parametrize(
    ("before", "after"),
    [(Options(1.0), Options(4.0)), (lambda v: v * 2, lambda v: v * 9), (array(1.0), array(7.0))],
    ids=["object", "function", "array"],
)
def test_arguments_that_print_alike_are_not_alike(before: Any, after: Any) -> None:
    x, y = data(8)
    model, reference = seeded(Optional), seeded(Optional)
    with wrapped(model, x, before, num_stages=4, n_microbatches=4) as pipe:
        pipe.step(x, before, target=y)
        model.zero_grad()
        found = Outcome(pipe.step(x, after, target=y), gradients_of(model))
    assert_close(found, plain(reference, lambda m: F.mse_loss(m(x, after), y)), 1e-12)


def test_an_argument_that_differs_in_every_step_warns_and_is_not_kept_for_ever() -> None:
    x, y = data(4)
    with (
        wrapped(seeded(Optional), x, Options(0.0), num_stages=2, n_microbatches=2) as pipe,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for number in range(1, 18):
            pipe.step(x, Options(float(number)), target=y)
    assert sum("recorded 16 times" in str(warning.message) and "arguments" in str(warning.message) for warning in caught) == 1


def test_values_of_micro_batches_that_differ_are_not_merged() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Tanh()

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"out": self.body(x), "rows": x.shape[0]}

    x, _ = data(3)
    with (
        wrapped(seeded(Counting), x, num_stages=1, n_microbatches=2) as pipe,
        pytest.raises(BatchError, match="cannot be merged"),
    ):
        pipe(x)
