"""How the loss is given, and how micro-batches count in it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxchimera
from fxchimera import BatchError, FxChimeraError
from tests.local.toys import WIDTH, chain, data, plain, seeded, wrapped
from tests.parity import Outcome, assert_close, gradients_of

CHIMERA_AND_1F1B = pytest.mark.parametrize("schedule", ["chimera", "1f1b"])


class WithLoss(nn.Module):
    """Returns its own loss in the form ``form`` gives it."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.body, self.form = chain(4), form

    def forward(self, x: Tensor, y: Tensor) -> Any:
        output = self.body(x)
        return self.form(F.mse_loss(output, y), output)


@dataclass
class Result:
    loss: Tensor
    logits: Tensor


FORMS = {
    "scalar": lambda loss, output: loss,
    "(loss, output)": lambda loss, output: (loss, output),
    "(output, loss)": lambda loss, output: (output, loss),
    "list": lambda loss, output: [output, loss],
    "dict": lambda loss, output: {"loss": loss, "logits": output},
    "object": lambda loss, output: Result(loss, output),
    "loss of shape (1,)": lambda loss, output: (loss.reshape(1), output),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_models_own_loss_in_every_form(form: str) -> None:
    """P19."""
    x, y = data(7)
    expected = plain(WithLoss(FORMS["scalar"]), lambda model: model(x, y))
    model = WithLoss(FORMS[form])
    with fxchimera.pipeline(model, example_args=(x, y), num_stages=2, n_microbatches=3) as pipe:
        loss = pipe.step(x, y)
    assert_close(Outcome(loss, gradients_of(model)), expected, 1e-12)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (lambda loss, output: output, r"tensors of shapes \[\(3, 6\)\]"),
        (lambda loss, output: (loss, loss + 1), r"tensors of shapes \[\(\), \(\)\]"),
        (lambda loss, output: {"logits": output}, "dict"),
    ],
)
def test_an_output_without_one_loss_is_refused_before_the_run(form: Any, text: str) -> None:
    x, y = data(6)
    model = WithLoss(form)
    with fxchimera.pipeline(model, example_args=(x, y), num_stages=2, n_microbatches=2) as pipe:
        with pytest.raises(FxChimeraError, match=text):
            pipe.step(x, y)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert pipe(x, y) is not None, "the pipeline must still be usable"


@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [
        (lambda output, target: (output - target).square(), r"a tensor of shape \(3, 6\) and torch.float64"),
        (lambda output, target: 3.0, r"returned 3\.0"),
        (lambda output, target: (output > target).sum(), "torch.int64"),
    ],
)
def test_a_loss_fn_that_returns_no_scalar_is_refused_with_its_place(loss_fn: Any, text: str) -> None:
    x, y = data(6)
    with wrapped(chain(4), x, loss_fn=loss_fn, num_stages=2, n_microbatches=2) as pipe:
        with pytest.raises(FxChimeraError, match=text) as caught:
            pipe.step(x, target=y)
        assert "test_api_loss.py" in str(caught.value)
        assert not isinstance(caught.value, fxchimera.PipelineError), "refused before anything runs"


def test_a_loss_fn_without_a_target() -> None:
    x, _ = data(6)
    expected = plain(chain(4), lambda model: model(x).square().mean())
    model = chain(4)
    with wrapped(model, x, loss_fn=lambda output: output.square().mean(), num_stages=2, n_microbatches=2) as pipe:
        assert_close(Outcome(pipe.step(x), gradients_of(model)), expected, 1e-12)


# ---------------------------------------------------------------------- weights


@CHIMERA_AND_1F1B
@pytest.mark.parametrize("rows", [7, 10])
def test_ragged_batches_are_weighted_by_rows(rows: int, schedule: str) -> None:
    """P03: 10 rows in 4 are 3, 3, 2, 2; the mean is over rows."""
    x, y = data(rows)
    expected = plain(chain(4), lambda model: F.mse_loss(model(x), y))
    model = chain(4)
    with wrapped(model, x, num_stages=2, n_microbatches=4, schedule=schedule) as pipe:
        assert_close(Outcome(pipe.step(x, target=y), gradients_of(model)), expected, 1e-12)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(11, WIDTH), chain(3), nn.Linear(WIDTH, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids))).transpose(1, 2)


def token_batch(ignored: int) -> tuple[Tensor, Tensor]:
    """Eight rows of 32 tokens, of which row i has 4 + 3i real ones (P06)."""
    generator = torch.Generator().manual_seed(0)
    ids, target = (torch.randint(0, 11, (8, 32), generator=generator) for _ in range(2))
    target[torch.arange(32) >= (4 + 3 * torch.arange(8))[:, None]] = ignored
    return ids, target


@pytest.mark.parametrize("n", [1, 3, 4, 8])
@pytest.mark.parametrize(
    ("ignored", "loss_fn", "loss_weight"),
    [
        (-100, F.cross_entropy, "samples"),  # recognised
        (5, nn.CrossEntropyLoss(ignore_index=5), "samples"),  # recognised
        (5, lambda output, target: F.cross_entropy(output, target, ignore_index=5), 5),
        (-100, lambda output, target: F.cross_entropy(output, target), lambda target, args, kwargs: (target != -100).sum()),
    ],
)
def test_tokens_that_do_not_count(n: int, ignored: int, loss_fn: Any, loss_weight: Any) -> None:
    """P06: the mean over real tokens, whatever N."""
    ids, target = token_batch(ignored)
    expected = plain(seeded(Tokens), lambda model: loss_fn(model(ids), target))
    model = seeded(Tokens)
    with wrapped(model, ids, loss_fn=loss_fn, loss_weight=loss_weight, num_stages=2, n_microbatches=n) as pipe:
        assert_close(Outcome(pipe.step(ids, target=target), gradients_of(model)), expected, 1e-12)


def test_a_micro_batch_without_real_tokens_counts_nothing() -> None:
    ids, target = token_batch(-100)
    target[:2] = -100  # all of the first micro-batch of four: torch's mean of nothing is nan
    expected = plain(seeded(Tokens), lambda model: F.cross_entropy(model(ids), target))
    model = seeded(Tokens)
    with wrapped(model, ids, loss_fn=F.cross_entropy, num_stages=2, n_microbatches=4) as pipe:
        assert_close(Outcome(pipe.step(ids, target=target), gradients_of(model)), expected, 1e-12)


def test_masked_targets_with_an_unknown_loss_warn() -> None:
    ids, target = token_batch(-100)
    model = seeded(Tokens)
    loss_fn = lambda output, y: F.cross_entropy(output, y)  # noqa: E731
    with (
        wrapped(model, ids, loss_fn=loss_fn, num_stages=2, n_microbatches=2) as pipe,
        pytest.warns(UserWarning, match="loss_weight=-100"),
    ):
        pipe.step(ids, target=target)


def test_no_warning_when_the_weight_is_given() -> None:
    ids, target = token_batch(-100)
    model = seeded(Tokens)
    loss_fn = lambda output, y: F.cross_entropy(output, y)  # noqa: E731
    with (
        wrapped(model, ids, loss_fn=loss_fn, loss_weight=-100, num_stages=2, n_microbatches=2) as pipe,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        pipe.step(ids, target=target)


@pytest.mark.parametrize(("loss_fn", "loss_weight"), [(nn.MSELoss(reduction="sum"), "samples"), (F.mse_loss, "sum")])
def test_a_loss_that_is_a_sum(loss_fn: Any, loss_weight: Any) -> None:
    x, y = data(7)
    sum_of = nn.MSELoss(reduction="sum")
    total = (lambda output, target: sum_of(output, target)) if loss_weight == "sum" else loss_fn
    expected = plain(chain(4), lambda model: sum_of(model(x), y))
    model = chain(4)
    with wrapped(model, x, loss_fn=total, loss_weight=loss_weight, num_stages=2, n_microbatches=3) as pipe:
        assert_close(Outcome(pipe.step(x, target=y), gradients_of(model)), expected, 1e-12)


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (lambda target, args, kwargs: -1.0, "not negative"),
        (lambda target, args, kwargs: 0.0, "at least one must be positive"),
        (lambda target, args, kwargs: float("nan"), "must be finite"),
        (lambda target, args, kwargs: "one", "must return a number"),
    ],
)
def test_weights_that_cannot_be(weight: Any, text: str) -> None:
    x, y = data(6)
    with wrapped(chain(4), x, loss_weight=weight, num_stages=2, n_microbatches=2) as pipe, pytest.raises(BatchError, match=text):
        pipe.step(x, target=y)


def test_loss_scale_scales_gradients_but_not_the_loss() -> None:
    x, y = data(6)
    expected = plain(chain(4), lambda model: F.mse_loss(model(x), y))
    for scale in (8.0, torch.tensor(8.0)):
        model = chain(4)
        with wrapped(model, x, num_stages=2, n_microbatches=2) as pipe:
            loss = pipe.step(x, target=y, loss_scale=scale)
        unscaled = {name: None if g is None else g / 8.0 for name, g in gradients_of(model).items()}
        assert_close(Outcome(loss, unscaled), expected, 1e-12)
