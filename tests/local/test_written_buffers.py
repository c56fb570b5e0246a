"""Models that write buffers in their own forward: every read sees its own micro-batch's value, in every one-copy schedule.

What is expected comes from a plain loop over the micro-batches, forward and backward of one before the next.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxchimera
from fxchimera_passes.errors import CaptureError
from tests.local.toys import WIDTH, Tanh, data, seeded, wrapped

pytestmark = pytest.mark.filterwarnings("error::fxchimera.CoarseCutWarning")


class Layers(nn.Module):
    """Four layers and some state; subclasses say how it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Tanh() for _ in range(4))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("older", torch.zeros(WIDTH))
        self.register_buffer("table", torch.arange(3.0 * WIDTH).view(3, WIDTH) / 10)


class Counted(Layers):
    """Writes in place and by rebinding; every layer's backward needs the count of its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        x = x - self.mean
        for layer in self.layers:
            x = layer(x) * (1 + 1 / self.count)
        return x * self.count


class OldRead(Layers):
    """The old value is saved for a backward, and still read after the new one is known."""

    def forward(self, x: Tensor) -> Tensor:
        old = self.mean
        x = self.layers[0](x) * (old + 1)
        self.mean = old + x.detach().mean(0)
        for layer in list(self.layers)[1:]:
            x = layer(x) * (1 + old)
        return x


class Queue(Layers):
    """Two buffers move up by one place, in the order of their names and against it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.older
        self.older = self.mean
        self.mean = x.detach().mean(0)
        for layer in self.layers:
            x = layer(x) * (1 + self.mean - self.older)
        return x


class OldView(Layers):
    """A view made before the write, and views made after it, are read all along the model."""

    def forward(self, x: Tensor) -> Tensor:
        row = self.table[1]
        self.table.mul_(0.5)
        self.table[0] = x.detach().mean(0)
        for layer in self.layers:
            x = layer(x) * row + self.table.sum(0)
        return x


class Gated(nn.Module):
    """A layer that is given the state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Tanh()

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        return self.layer(x) * torch.sigmoid(count)


class Passed(Layers):
    """The written buffer is handed to submodules, and is a part of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gated() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.count.add_(x.detach().sum())
        for layer in self.layers:
            x = layer(x, self.count)
        return x, self.count


class Peeks(nn.Module):
    """Reads the running mean of a batch norm outside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(self.first(x)) + self.norm.running_mean)
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {c.__name__: c for c in (Counted, OldRead, Queue, OldView, Passed, Peeks)}
CASES = [(name, *how) for name in MODELS for how in (("1f1b", 2, 1), ("1f1b", 2, 3), ("chimera", 2, 1))]
CASES += [(name, "1f1b", 4, 2) for name in MODELS if name != "Peeks"]
CASES += [("Counted", "gpipe", 4, 3), ("Counted", "interleaved-1f1b", 2, 4)]


def loss_of(output: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
    return F.mse_loss(output[0] if isinstance(output, tuple) else output, target)


def loop(model: nn.Module, x: Tensor, y: Tensor, n: int) -> Tensor:
    """Forward and backward of each micro-batch in turn."""
    total = torch.zeros((), dtype=x.dtype)
    for a, b in zip(x.chunk(n), y.chunk(n), strict=True):
        loss = loss_of(model(a), b) / n
        if loss.requires_grad:
            loss.backward()
        total += loss.detach()
    return total


def same_buffers(ours: nn.Module, plain: nn.Module) -> None:
    for (name, a), (_, b) in zip(ours.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(a, b), name


def same(ours: nn.Module, plain: nn.Module) -> None:
    same_buffers(ours, plain)
    for (name, p), (_, q) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert p.grad is not None, name
        assert q.grad is not None, name
        assert torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize(("name", "schedule", "stages", "n"), CASES)
def test_two_steps_and_an_evaluation_equal_the_plain_loop(name: str, schedule: str, stages: int, n: int) -> None:
    model, (x, y) = seeded(MODELS[name]), data(4 * n)
    plain = copy.deepcopy(model)
    with wrapped(model, x, loss_fn=loss_of, num_stages=stages, n_microbatches=n, schedule=schedule) as pipe:
        for shift in (0.0, 0.5):
            torch.testing.assert_close(pipe.step(x + shift, target=y), loop(plain, x + shift, y, n))
            same(model, plain)
            model.zero_grad()
            plain.zero_grad()
        plain.eval()
        with torch.no_grad():
            expected = loop(plain, x, y, n)
        torch.testing.assert_close(pipe.evaluate(x, target=y), expected)
        same_buffers(model, plain)


def test_two_copies_of_each_stage_are_refused_by_the_name_of_the_buffer() -> None:
    x, _ = data(8)
    with pytest.raises(fxchimera.FxChimeraError, match=r"'count' is written in forward"):
        wrapped(seeded(Counted), x, num_stages=4, n_microbatches=2, schedule="chimera")


def test_statistics_read_outside_their_layer_are_refused_for_two_copies() -> None:
    x, _ = data(8)
    with pytest.raises(fxchimera.FxChimeraError, match=r"'norm.running_mean' are read outside their layer"):
        wrapped(seeded(Peeks), x, num_stages=2, n_microbatches=2, schedule="chimera")


class Grows(Layers):
    """Puts a buffer of another shape in the place of the old one."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.detach().mean()
        return x


class Retyped(Layers):
    """Puts a buffer of another type in the place of the old one."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.detach().mean(0).float()
        return x


class Merged(Layers):
    """Lets two buffers be one tensor, so that a later write would change both."""

    def forward(self, x: Tensor) -> Tensor:
        self.older = self.mean
        return x


@pytest.mark.parametrize(
    ("model", "message"),
    [(Grows, r"shape \(\) instead of \(6,\)"), (Retyped, r"float32 instead of torch\.float64"), (Merged, r"the tensor of mean")],
)
def test_what_cannot_be_written_back_is_refused(model: type[nn.Module], message: str) -> None:
    x, _ = data(4)
    with pytest.raises(CaptureError, match=message):
        wrapped(seeded(model), x, num_stages=2, n_microbatches=1, schedule="1f1b")
