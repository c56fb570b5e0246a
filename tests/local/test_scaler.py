"""Gradient scalers: half precision with overflows, step for step as the plain model trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxchimera import FxChimeraError
from tests import tools
from tests.local.toys import chain, data, wrapped


@pytest.mark.parametrize(("name", "schedule"), [("mlp", "chimera"), ("tied", "zbv")])
def test_steps_are_skipped_and_scales_change_as_for_the_plain_model(name: str, schedule: str) -> None:
    steps = 7
    found, expected = tools.scaled(name, 2, 4, schedule, steps), tools.scaled_plainly(name, 4, steps)
    assert found["scales"] == expected["scales"]
    assert found["skipped"] == expected["skipped"]
    assert 0 < sum(expected["skipped"]) < steps
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(found["state"], expected["state"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("scale", "words"),
    [(torch.ones(2), r"Tensor of shape \(2,\)"), ("big", "str 'big'"), (float("inf"), "loss_scale is inf"), (None, "NoneType")],
)
def test_what_is_no_scale_is_refused_and_the_next_step_runs(scale: Any, words: str) -> None:
    x, y = data(4)
    with wrapped(chain(2), x, num_stages=2, n_microbatches=2) as pipe:
        with pytest.raises(FxChimeraError, match=words):
            pipe.step(x, target=y, loss_scale=scale)
        pipe.step(x, target=y, loss_scale=torch.tensor([2.0], requires_grad=True))
