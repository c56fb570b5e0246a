"""What is refused, with which words, and that nothing has happened by then."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec

import fxchimera
from fxchimera import BatchError, CaptureError, FxChimeraError, PartitionError, PipelineError, ScheduleError
from fxchimera.schedule import make_order
from tests.local.toys import WIDTH, Tanh, chain, data, plain, seeded, wrapped
from tests.parity import Outcome, assert_close, assert_same_tensors, gradients_of

# ---------------------------------------------------------------------- at wrap


def test_an_odd_number_of_stages_is_refused_by_chimera_with_the_reason() -> None:
    x, y = data(6)
    with pytest.raises(ScheduleError, match=r"even number of stages, got num_stages=3.*1f1b"):
        wrapped(chain(6), x, num_stages=3, n_microbatches=4)
    model = chain(6)
    with wrapped(model, x, num_stages=3, n_microbatches=4, schedule="1f1b") as pipe:
        found = Outcome(pipe.step(x, target=y), gradients_of(model))
    assert_close(found, plain(chain(6), lambda m: F.mse_loss(m(x), y)), 1e-12)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_stages": 4, "n_microbatches": 2, "schedule": "zigzag"}, ScheduleError, "unknown schedule 'zigzag'.*'chimera'"),
        ({"num_stages": 0, "n_microbatches": 2}, FxChimeraError, "0"),
        ({"num_stages": 2, "n_microbatches": 0}, FxChimeraError, "0"),
        ({"num_stages": 2, "n_microbatches": 9}, BatchError, "8 rows cannot be divided into n_microbatches=9"),
        (
            {"num_stages": 17, "n_microbatches": 2, "schedule": "1f1b"},
            PartitionError,
            "17 stages were asked for.*has 16 parameters",
        ),
        ({"num_stages": 2, "n_microbatches": 2, "cost": "guess"}, FxChimeraError, "guess"),
        ({"num_stages": 2, "n_microbatches": 2, "split_points": ["nowhere"]}, PartitionError, "nowhere"),
        ({"num_stages": 2, "n_microbatches": 2, "args_chunk_spec": (None, None)}, BatchError, "2 entries for 1 positional"),
        ({"num_stages": 2, "n_microbatches": 2, "kwargs_chunk_spec": {"m": None}}, BatchError, r"names \['m'\]"),
        ({"num_stages": 2, "n_microbatches": 2, "args_chunk_spec": (TensorChunkSpec(4),)}, BatchError, "names dimension 4"),
        ({"num_stages": 2, "n_microbatches": 4, "schedule": make_order("gpipe", 2, 3)}, ScheduleError, "3 micro-batches"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else None,
)
def test_options_that_do_not_fit(options: dict[str, Any], error: type[Exception], text: str) -> None:
    x, _ = data(8)
    threads = threading.active_count()
    with pytest.raises(error, match=text):
        wrapped(chain(8), x, **options)
    assert threading.active_count() == threads


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Tanh() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if float(x.sum()) > 0:  # the recording cannot keep both ways
                x = x + 1
        return x


def test_split_points_in_a_model_that_cannot_be_recorded_are_refused_with_the_users_line() -> None:
    x, _ = data(6)
    with pytest.raises(CaptureError, match=r"test_api_mistakes\.py:\d+: \w+\(\) reads"):
        wrapped(seeded(Branching), x, num_stages=2, n_microbatches=2, split_points=["layers.2"])


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return torch.tanh(self.linear(x))


class Averaging(nn.Module):
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y


@pytest.mark.parametrize(("kind", "text"), [(Counting, r"'1'.*Counting.*seen"), (Averaging, r"'1\.average'")])
def test_state_outside_parameters_needs_one_copy_of_each_stage(kind: type[nn.Module], text: str) -> None:
    """Two copies could not agree, so chimera refuses by name; with one copy the model trains as the plain loop does."""
    x, y = data(8)

    def build() -> nn.Module:
        return seeded(lambda: nn.Sequential(Tanh(), kind(), Tanh(), Tanh()))

    with pytest.raises(FxChimeraError, match=text + '.*schedule="1f1b"'):
        wrapped(build(), x, num_stages=2, n_microbatches=4)
    model, reference = build(), build()
    with wrapped(model, x, num_stages=2, n_microbatches=4, schedule="1f1b") as pipe:
        found = Outcome(pipe.step(x, target=y), gradients_of(model))
    for rows, wanted in zip(x.chunk(4), y.chunk(4), strict=True):
        (F.mse_loss(reference(rows), wanted) / 4).backward()
    assert_close(found, Outcome(found.loss, gradients_of(reference)), 1e-12)
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-12, atol=0.0)
    assert getattr(model[1], "seen", 4) == 4


# ---------------------------------------------------------------------- at a step


def test_a_parameter_that_was_replaced_is_named() -> None:
    x, y = data(8)
    model = chain(4)
    with wrapped(model, x, num_stages=2, n_microbatches=4) as pipe:
        old = model[1].linear.weight
        model[1].linear.weight = nn.Parameter(torch.zeros_like(old))
        for call in (lambda: pipe.step(x, target=y), lambda: pipe(x)):
            with pytest.raises(FxChimeraError, match=r"'1\.linear\.weight' is another object"):
                call()
        model[1].linear.weight = old
        assert torch.isfinite(pipe.step(x, target=y))


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        (lambda x, y: (x[:3],), lambda x, y: {"target": y[:3]}, "3 rows cannot be divided into n_microbatches=4"),
        (lambda x, y: (x,), lambda x, y: {"target": y[:7]}, r"argument 0 \(8, 6\), target \(7, 6\)"),
        (lambda x, y: (), lambda x, y: {"target": None}, "no tensor with a batch dimension"),
    ],
)
def test_a_batch_that_cannot_be_divided(args: Any, kwargs: Any, text: str) -> None:
    x, y = data(8)
    model = chain(4)
    with wrapped(model, x, num_stages=2, n_microbatches=4) as pipe:
        with pytest.raises(BatchError, match=text):
            pipe.step(*args(x, y), **kwargs(x, y))
        found = Outcome(pipe.step(x, target=y), gradients_of(model))
    assert_close(found, plain(chain(4), lambda m: F.mse_loss(m(x), y)), 1e-12)


def test_a_step_without_gradients_is_refused() -> None:
    x, y = data(8)
    with wrapped(chain(4), x, num_stages=2, n_microbatches=4) as pipe, torch.no_grad():
        with pytest.raises(FxChimeraError, match="no_grad"):
            pipe.step(x, target=y)
        pipe.evaluate(x, target=y)


def test_a_closed_pipeline_says_so() -> None:
    x, y = data(8)
    pipe = wrapped(chain(4), x, num_stages=2, n_microbatches=4)
    pipe.close()
    for call in (lambda: pipe.step(x, target=y), lambda: pipe(x), lambda: pipe.evaluate(x, target=y)):
        with pytest.raises(FxChimeraError, match="closed"):
            call()
    assert set(pipe.state_dict()) == set(chain(4).state_dict())


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    x, _ = data(8)
    model = chain(4)
    with wrapped(model, x, num_stages=2, n_microbatches=4) as pipe:
        good = seeded(lambda: nn.Sequential(*(Tanh() for _ in range(4))), 5).state_dict()
        with pytest.raises(FxChimeraError, match=r"missing \['3\.linear\.bias'\]"):
            pipe.load_state_dict({key: value for key, value in good.items() if key != "3.linear.bias"})
        with pytest.raises(FxChimeraError, match=r"unexpected \['more'\]"):
            pipe.load_state_dict({**good, "more": torch.zeros(1)})
        with pytest.raises(FxChimeraError, match=r"'3\.linear\.bias' has shape \(2,\), the model's \(6,\)"):
            pipe.load_state_dict({**good, "3.linear.bias": torch.zeros(2)})
        assert_same_tensors(pipe.state_dict(), chain(4).state_dict())
        pipe.load_state_dict({"0.linear.bias": good["0.linear.bias"]}, strict=False)
        assert torch.equal(model[0].linear.bias, good["0.linear.bias"])


def test_the_errors_are_of_one_family() -> None:
    for error in (BatchError, CaptureError, PartitionError, PipelineError, ScheduleError):
        assert issubclass(error, FxChimeraError)
    assert fxchimera.FxChimeraError is FxChimeraError
