"""Assumed answers and errors: on a wrong path, on the right one, and where no path is ever right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxchimera
from fxchimera.errors import FxChimeraError, PipelineError
from tests.branching import WIDTH, batches, build, plain_step, square

pytestmark = pytest.mark.filterwarnings("ignore:.*depends on parameters", "ignore:the model has been recorded")


def wrap(model: nn.Module, stages: int, n: int, schedule: str) -> fxchimera.Pipeline:
    return fxchimera.pipeline(
        model, example_args=(batches(1)[0],), loss_fn=square, num_stages=stages, n_microbatches=n, schedule=schedule, seed=7
    )


def train(pipe: fxchimera.Pipeline, xs: list[Tensor]) -> None:
    for x in xs:
        pipe.step(x)


def test_an_answer_that_is_never_right_is_an_error_that_names_it():
    signs = [1.0]

    class Unsteady(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            signs[0] = -signs[0]
            return x.abs() * signs[0]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.unsteady = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Unsteady()

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            if self.unsteady(y).sum() > 0:
                return self.last(y)
            return self.last(-y)

    model = Model().double()
    text = r"after 64 runs .*bool\(\) in Model at .*test_assumed_errors\.py:\d+.*submodule"

    with wrap(model, 2, 1, "1f1b") as pipe, pytest.raises(FxChimeraError, match=text):
        train(pipe, batches(1) * 4)  # while paths are still recorded, a step may come out right


def signed_batches() -> list[Tensor]:
    """Batches whose first layers give means of both signs, as they have no bias."""
    x = batches(1)[0]
    return [x, -x, 2 * x]


@pytest.mark.parametrize(("stages", "n", "schedule"), [(2, 2, "chimera"), (2, 4, "zb-h1"), (4, 1, "1f1b"), (4, 4, "chimera")])
def test_an_error_on_a_wrong_path_is_forgotten_with_the_run(stages, n, schedule):
    model, plain = build("factors"), build("factors")
    with wrap(model, stages, n, schedule) as pipe:
        for x in signed_batches():
            torch.testing.assert_close(pipe.step(x), plain_step(plain, x, n), rtol=1e-12, atol=0)
        assert pipe._attempts.repeated > 0
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}")


def test_the_reference_finds_the_right_path_past_an_error():
    model, plain = build("factors"), build("factors")
    for x in signed_batches():
        plain.zero_grad()
        expected = plain_step(plain, x, 2)
        found = fxchimera.reference(model, x, loss_fn=square, num_stages=2, n_microbatches=2, schedule="chimera", seed=7)
        torch.testing.assert_close(found.loss, expected, rtol=1e-12, atol=0)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found.gradients[name], parameter.grad, rtol=1e-11, atol=1e-13)


def test_an_error_on_the_right_path_is_raised():
    model = build("factors", careless=True)
    text = r"rank \d failed: stage \d.*micro-batch 0.*LinAlgError"
    with wrap(model, 4, 1, "1f1b") as pipe, pytest.raises(PipelineError, match=text) as caught:
        train(pipe, signed_batches())
    assert isinstance(caught.value.__cause__, torch.linalg.LinAlgError)
