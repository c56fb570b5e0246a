"""Modules that keep tensors in plain attributes from one forward to the next.

What is expected comes from a plain loop over the micro-batches, forward and backward of one before the next.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxchimera
from fxchimera_passes.capture import capture
from tests.local.toys import Tanh, data, seeded, wrapped


class Keeper(nn.Module):
    """A layer that remembers its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Tanh()
        self.state: Tensor | None = None


class Attached(Keeper):
    """Reads the last output with its autograd graph."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if self.state is not None:
            y = y + self.state.mean(0)
        self.state = y
        return y


class Detached(Keeper):
    """Reads the last output's value."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if self.state is not None:
            y = y + self.state.mean(0)
        self.state = y.detach()
        return y


class Shown(Keeper):
    """Keeps its output for somebody else to look at."""

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.layer(x)
        return self.state


class Reset(nn.Module):
    """Heavy, so that it is recorded by its inner calls; empties the layer's memory before every call."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.keeper, self.after = nn.Sequential(Tanh(), Tanh()), Attached(), nn.Sequential(Tanh(), Tanh())

    def forward(self, x: Tensor) -> Tensor:
        self.keeper.state = None
        y: Tensor = self.after(self.keeper(self.before(x)))
        return y


class RootState(nn.Module):
    """The model itself remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Tanh(), Tanh()
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.one(x)
        if self.state is not None:
            y = y + self.state
        self.state = y.detach().mean(0)
        z: Tensor = self.two(y)
        return z


def around(kind: type[nn.Module]) -> nn.Module:
    return seeded(lambda: nn.Sequential(Tanh(), kind(), Tanh(), Tanh()))


def steps_equal_the_plain_loop(model: nn.Module, n: int) -> None:
    plain, (x, y) = copy.deepcopy(model), data(4 * n)
    with wrapped(model, x, num_stages=3, n_microbatches=n, schedule="1f1b") as pipe:
        for shift in (0.0, 0.5):
            loss = pipe.step(x + shift, target=y)
            total = torch.zeros((), dtype=x.dtype)
            for a, b in zip((x + shift).chunk(n), y.chunk(n), strict=True):
                part = F.mse_loss(plain(a), b) / n
                part.backward()
                total += part.detach()
            torch.testing.assert_close(loss, total)
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert p.grad is not None
                assert q.grad is not None
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)
            model.zero_grad()
            plain.zero_grad()


@pytest.mark.parametrize("kind", [Detached, Shown, Reset])
@pytest.mark.parametrize("n", [1, 3])
def test_state_without_autograd_history_is_as_in_the_plain_loop(kind: type[nn.Module], n: int) -> None:
    steps_equal_the_plain_loop(around(kind), n)


def test_state_with_autograd_history_is_refused_for_several_micro_batches() -> None:
    x, _ = data(6)
    with pytest.raises(fxchimera.FxChimeraError, match=r"module '1' \(Attached\) keeps state .*detach.*n_microbatches=1"):
        wrapped(around(Attached), x, num_stages=2, n_microbatches=2, schedule="1f1b")


def test_state_with_autograd_history_is_as_in_the_plain_model_for_one_micro_batch() -> None:
    model, (x, y) = around(Attached), data(4)
    plain = copy.deepcopy(model)
    with wrapped(model, x, num_stages=2, n_microbatches=1, schedule="1f1b") as pipe:
        pipe.step(x, target=y)
    F.mse_loss(plain(x), y).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


def test_state_that_the_model_itself_reads_is_refused() -> None:
    x, _ = data(4)
    with pytest.raises(fxchimera.FxChimeraError, match=r"RootState itself keeps state for its next call.*register_buffer"):
        wrapped(seeded(RootState), x, num_stages=2, n_microbatches=1, schedule="1f1b")


@pytest.mark.parametrize(
    ("kind", "carried", "attached"),
    [(Attached, ("state",), ("state",)), (Detached, ("state",), None), (Shown, None, None), (Reset, None, None)],
)
def test_the_report_tells_what_is_carried(kind: type[nn.Module], carried: Any, attached: Any) -> None:
    model, (x, _) = around(kind), data(4)
    report = capture(model, (x,), {}, num_stages=2).report
    assert report.carried == ({} if carried is None else {"1": carried})
    assert report.attached == ({} if attached is None else {"1": attached})
    assert ("sets state of 1.keeper" in report.closed["1"]) == (kind is Reset)
    assert all(getattr(module, "state", None) is None for module in model.modules())
