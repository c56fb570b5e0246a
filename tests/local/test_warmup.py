"""Recordings in advance: what ``warmup`` has paid, no later call pays again; counted at the recorder's own door."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxchimera import BatchError, FxChimeraError, Pipeline
from fxchimera.runtime.stages import program
from fxchimera_passes.plan import StagePlan
from tests.local.toys import WIDTH, Tanh, chain, data, plain, seeded, wrapped
from tests.parity import Outcome, assert_close, gradients_of
from tests.warming import Flagged


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of the first input of every recording after the wrapping."""
    rows: list[int] = []
    original = program.recapture

    def counting(captured: Any, args: Any, kwargs: Any, **options: Any) -> Any:
        rows.append(next(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)).shape[0])
        return original(captured, args, kwargs, **options)

    monkeypatch.setattr(program, "recapture", counting)
    return rows


def exact(pipe: Pipeline, model: nn.Module, reference: nn.Module, x: Tensor, y: Tensor, *args: Any) -> None:
    """One step is the plain model's."""
    model.zero_grad()
    reference.zero_grad()
    found = Outcome(pipe.step(x, *args, target=y), gradients_of(model))
    assert_close(found, plain(reference, lambda m: F.mse_loss(m(x, *args), y)), 1e-12)


@pytest.mark.parametrize("meta", [False, True])
def test_what_was_warmed_up_is_not_recorded_again(recorded: list[int], meta: bool) -> None:
    """Batches of 8 are wrapped; the epoch ends with 5 rows in 4 micro-batches: 2, 1, 1, 1."""
    x, y = data(8)
    last, last_y = data(5)
    model = chain(4)
    with wrapped(model, x, num_stages=2, n_microbatches=4) as pipe:
        signature = (last.to("meta") if meta else last,)
        assert pipe.warmup(signature) == 3, "one row in training, two rows and one row in evaluation"
        assert sorted(recorded) == [1, 1, 2]
        pipe.warmup(signature, x)
        recorded.clear()
        for _ in range(2):
            exact(pipe, model, chain(4), x, y)
            exact(pipe, model, chain(4), last, last_y)
            pipe.evaluate(x, target=y)
            pipe.evaluate(last, target=last_y)
            pipe.eval()(last)
            pipe.train()
        assert recorded == []


def test_a_last_smaller_batch_costs_one_recording_a_shape_and_keeps_the_cuts(
    recorded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[StagePlan] = []
    transfer = program.transfer

    def noting(*args: Any) -> StagePlan:
        plans.append(transfer(*args))
        return plans[-1]

    monkeypatch.setattr(program, "transfer", noting)
    x, _ = data(8)
    model = chain(5)
    with wrapped(model, x, num_stages=2, n_microbatches=4) as pipe:
        for _epoch in range(3):
            for rows in (8, 8, 4):
                exact(pipe, model, chain(5), *data(rows))
        assert recorded == [1], "not once a micro-batch, step or epoch"
        (plan,) = plans
        assert [stage.parameters for stage in plan.stages] == [stage.parameters for stage in pipe.plan.stages]
        assert plan.owner == pipe.plan.cut.owner


def test_masks_flags_lengths_and_modes_are_recorded_once_each(recorded: list[int]) -> None:
    """Three rounds over all signatures record each at its first use; ``warmup`` by pairs pays the same ones in advance."""
    model, reference = seeded(Flagged), seeded(Flagged)
    long, short = data(4, 7, WIDTH), data(4, 3, WIDTH)
    signatures: list[tuple[Any, Any, dict[str, Any]]] = [
        (long, (), {}), (short, (), {}), (long, (torch.ones(4, 7, 1).double(),), {}), (short, (None,), {"double": True}),
    ]  # fmt: skip
    with wrapped(model, long[0], num_stages=2, n_microbatches=2) as pipe:
        for _ in range(3):
            for (x, y), args, kwargs in signatures:
                model.zero_grad()
                reference.zero_grad()
                found = Outcome(pipe.step(x, *args, target=y, **kwargs), gradients_of(model))
                expected = plain(reference, lambda m, x=x, y=y, a=args, k=kwargs: F.mse_loss(m(x, *a, **k), y))
                assert_close(found, expected, 1e-12)
                pipe.evaluate(x, *args, target=y, **kwargs)
        assert len(recorded) == 3 + 4, "the first was recorded at wrap for training"
    recorded.clear()
    with wrapped(seeded(Flagged), long[0], num_stages=2, n_microbatches=2) as pipe:
        pipe.warmup(*(((x, *args), kwargs) for (x, _), args, kwargs in signatures), training=False)
        assert len(recorded) == 4
        recorded.clear()
        for (x, y), args, kwargs in signatures:
            pipe.evaluate(x, *args, target=y, **kwargs)
        assert recorded == []


def test_signatures_may_be_keyword_arguments(recorded: list[int]) -> None:
    x, y = data(4)
    with wrapped(seeded(Flagged), x, num_stages=2, n_microbatches=2) as pipe:
        assert pipe.warmup({"x": x, "double": True}, evaluation=False) == 1
        pipe.step(x=x, double=True, target=y)
        assert len(recorded) == 1
        with pytest.raises(BatchError, match=r"a signature for warmup.* is a int"):
            pipe.warmup(3)


def test_modes_and_gradients_are_as_before() -> None:
    x, _ = data(8)
    model = nn.Sequential(*(nn.Sequential(Tanh(), nn.BatchNorm1d(WIDTH)) for _ in range(4))).double()
    model[1].eval()
    modes = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with wrapped(model, x, num_stages=2, n_microbatches=2) as pipe:
        pipe.warmup(data(6)[0], x)
        assert [module.training for module in model.modules()] == modes
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())
        pipe.eval().warmup(x)
        assert not any(module.training for module in model.modules())


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Tanh(), Tanh()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(-hidden if bool((x > 0).all()) else hidden)


def test_a_value_that_is_read_must_be_given(recorded: list[int]) -> None:
    """A guard holds for the value it saw: positive inputs take another path than the example."""
    x, y = data(4)
    model, reference = seeded(Branching), seeded(Branching)
    with wrapped(model, x, num_stages=2, n_microbatches=2) as pipe:
        with pytest.raises(BatchError, match=r"meta tensors .*bool\(\) in Branching at .*test_warmup.py:\d+ reads a value"):
            pipe.warmup(data(6)[0].to("meta"))
        recorded.clear()
        assert pipe.warmup(x.abs(), evaluation=False) == 1
        exact(pipe, model, reference, x.abs(), y)
        exact(pipe, model, reference, x, y)
        assert len(recorded) == 1


class Skipping(nn.Module):
    """Leaves layers out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Tanh() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or torch.rand(()) > 0.5:
                x = layer(x)
        return x


def test_the_plans_report_says_what_the_recording_holds_for() -> None:
    x, _ = data(4)
    with wrapped(seeded(Branching), x, num_stages=2, n_microbatches=2) as pipe:
        text = str(pipe.plan.report)
    assert f"bool() in Branching is False  ({__file__}:" in text
    assert "the model: the model itself" in text


def test_paths_of_coming_steps_can_be_recorded(recorded: list[int]) -> None:
    x, y = data(4)
    with wrapped(seeded(Skipping), x, num_stages=2, n_microbatches=2, seed=5) as pipe:
        assert pipe.warmup(x, evaluation=False, steps=4) == len(recorded) > 1
        recorded.clear()
        for _ in range(4):
            pipe.step(x, target=y)
        assert recorded == []


def test_many_recordings_that_were_asked_for_do_not_warn_but_more_than_are_kept_are_refused(recorded: list[int]) -> None:
    x, y = data(4)
    with (
        wrapped(chain(2), x, num_stages=2, n_microbatches=2) as pipe,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        batches = [data(2 * rows)[0] for rows in range(3, 23)]
        assert pipe.warmup(*batches, evaluation=False) == 20
        pipe.step(batches[0], target=torch.zeros_like(batches[0]))
        assert len(recorded) == 20
        assert not [warning for warning in caught if "recorded" in str(warning.message)]
        with pytest.raises(FxChimeraError, match="more than 64 recordings"):
            pipe.warmup(*(data(2 * rows)[0] for rows in range(1, 67)), evaluation=False)
        pipe.step(x, target=y)
