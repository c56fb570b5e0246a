"""Deferred batch norm learns the statistics of the whole batch, once a step; the usual one says what it does."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxchimera.errors import FxChimeraError
from tests.local.toys import data, seeded, wrapped

ROWS, N, MOMENTUM = 14, 4, 0.1  # micro-batches of 4, 4, 3 and 3 rows


class Convolved(nn.Module):
    """Two batch norms; what the second sees depends on how the first normalises."""

    def __init__(self, momentum: float | None = MOMENTUM) -> None:
        super().__init__()
        self.conv, self.first = nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5, momentum=momentum)
        self.middle, self.second = nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=momentum)
        self.head = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(self.conv(x))).mean((2, 3))
        y: Tensor = self.head(torch.relu(self.second(self.middle(x))))
        return y


def batch() -> tuple[Tensor, Tensor]:
    return data(ROWS, 2, 5, 5)[0], data(ROWS)[1]


def whole_batch(model: nn.Module, x: Tensor) -> dict[str, list[Tensor]]:
    """Mean and variance of all that each batch norm sees in a loop over the micro-batches."""
    seen: dict[str, list[Tensor]] = {"first": [], "second": []}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0].detach()))
        for name in seen
    ]
    twin_state = {key: value.clone() for key, value in model.state_dict().items()}
    for piece in x.tensor_split(N):
        model(piece)
    model.load_state_dict(twin_state)
    for hook in hooks:
        hook.remove()
    found = {}
    for name, parts in seen.items():
        values = torch.cat([part.transpose(0, 1).flatten(1) for part in parts], 1)
        found[name] = [values.mean(1), values.var(1)]
    return found


@pytest.mark.parametrize("schedule", ["chimera", "1f1b", "zbv"])
@pytest.mark.parametrize("momentum", [MOMENTUM, None])
def test_deferred_statistics_are_the_whole_batchs(schedule: str, momentum: float | None) -> None:
    """Three steps with an optimizer; the first layer's statistics are those of a plain step on the whole batch."""
    model, twin = (seeded(lambda: Convolved(momentum)) for _ in range(2))
    x, y = batch()
    expected = {name: [torch.zeros(width).double(), torch.ones(width).double()] for name, width in (("first", 5), ("second", 4))}
    with wrapped(model, x, num_stages=2, n_microbatches=N, schedule=schedule, batch_norm="deferred") as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
        for number in range(1, 4):
            twin.load_state_dict(model.state_dict())
            share = 1 / number if momentum is None else momentum
            for name, found in whole_batch(twin, x).items():
                expected[name] = [(1 - share) * old + share * new for old, new in zip(expected[name], found, strict=True)]
            twin(x)
            pipe.step(x, target=y)
            for name, (mean, var) in expected.items():
                layer = model.get_submodule(name)
                torch.testing.assert_close(layer.running_mean, mean, rtol=1e-12, atol=1e-13)
                torch.testing.assert_close(layer.running_var, var, rtol=1e-12, atol=1e-13)
                assert int(layer.num_batches_tracked) == number
            torch.testing.assert_close(model.first.state_dict(), twin.first.state_dict(), rtol=1e-12, atol=1e-13)
            optimizer.step()
            optimizer.zero_grad()
        assert model.first.momentum == momentum
        assert "forward" not in vars(model.first)


@pytest.mark.parametrize("schedule", ["chimera", "1f1b"])
def test_deferral_changes_no_loss_and_no_gradient(schedule: str) -> None:
    x, y = batch()
    outcomes = []
    for batch_norm in ("each", "deferred"):
        model = seeded(Convolved)
        with wrapped(model, x, num_stages=2, n_microbatches=N, schedule=schedule, batch_norm=batch_norm) as pipe:
            outcomes.append([pipe.step(x, target=y), *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *outcomes))


@pytest.mark.parametrize("schedule", ["chimera", "1f1b"])
def test_steps_without_exchange_and_calls_in_training_mode_count_one_by_one(schedule: str) -> None:
    model = seeded(Convolved)
    x, y = batch()
    (mean, var), width = whole_batch(seeded(Convolved), x)["first"], 5
    with wrapped(model, x, num_stages=2, n_microbatches=N, schedule=schedule, batch_norm="deferred") as pipe:
        with pipe.no_sync():
            pipe.step(x, target=y)
        pipe.step(x, target=y)
        pipe(x)
        pipe.evaluate(x, target=y)
    keep = (1 - MOMENTUM) ** 3
    assert int(model.first.num_batches_tracked) == 3
    torch.testing.assert_close(model.first.running_mean, (1 - keep) * mean, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(
        model.first.running_var, keep * torch.ones(width).double() + (1 - keep) * var, rtol=1e-12, atol=1e-13
    )


def test_a_layer_called_twice_learns_from_both_calls_at_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.norm(x) + self.norm(2 * x + 1))
            return y

    model = seeded(Twice)
    x, y = data(ROWS)
    with wrapped(model, x, num_stages=2, n_microbatches=N, batch_norm="deferred") as pipe:
        pipe.step(x, target=y)
    both = torch.cat([x, 2 * x + 1])
    torch.testing.assert_close(model.norm.running_mean, MOMENTUM * both.mean(0), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(model.norm.running_var, 1 - MOMENTUM + MOMENTUM * both.var(0), rtol=1e-12, atol=1e-13)
    assert int(model.norm.num_batches_tracked) == 1


def notes(model: nn.Module, n: int, **options: str) -> list[str]:
    x, _ = batch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped(model, x, num_stages=2, n_microbatches=n, **options).close()
    return [str(one.message) for one in caught if "batch norm" in str(one.message)]


def test_one_warning_names_the_layers() -> None:
    (text,) = notes(seeded(Convolved), N)
    assert text.startswith("batch norm in 'first', 'second': each of 4 micro-batches is normalised by its own statistics")
    assert 'batch_norm="deferred"' in text


def test_no_warning_where_nothing_differs() -> None:
    frozen = seeded(Convolved)
    frozen.first.eval()
    frozen.second.eval()
    assert notes(seeded(Convolved), 1) == notes(frozen, N) == notes(seeded(Convolved), N, batch_norm="deferred") == []


def test_another_word_is_refused() -> None:
    with pytest.raises(FxChimeraError, match='batch_norm must be "each" or "deferred", got \'sync\''):
        wrapped(seeded(Convolved), batch()[0], num_stages=2, n_microbatches=N, batch_norm="sync")


def test_many_layers_are_counted() -> None:
    model = seeded(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(5))))
    x, _ = data(8)
    with pytest.warns(UserWarning, match=r"batch norm in '0\.1', '1\.1', '2\.1' and 2 more"):
        wrapped(model, x, loss_fn=F.mse_loss, num_stages=2, n_microbatches=2).close()
