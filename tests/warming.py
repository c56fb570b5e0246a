"""What the ranks of tests/process/test_warmup.py do; every function runs in each process."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxchimera.runtime.stages import program
from tests.local.toys import WIDTH, Tanh, chain, data, seeded, wrapped
from tests.workers import owned_gradients, rank

__all__ = ["Flagged", "Selecting", "differ", "epochs", "flags", "selected_gradients", "selecting"]


def epochs() -> tuple[int, int, int, list[float]]:
    """Two epochs that end with a smaller batch, with evaluation, another length and back; how often was recorded, and the losses.

    First without ``warmup``, then the same with it: (recordings, recordings in advance, recordings after it, losses).
    """
    counts: list[int] = []
    losses: list[float] = []
    for warm in (False, True):
        with patch.object(program, "recapture", wraps=program.recapture) as recapture:
            with wrapped(chain(4), data(8)[0], num_stages=2, n_microbatches=4) as pipe:
                if warm:
                    pipe.warmup(data(8)[0].to("meta"), (data(4)[0],))
                    counts.append(recapture.call_count)
                    recapture.reset_mock()
                for _ in range(2):
                    for rows in (8, 8, 4):
                        x, y = data(rows)
                        losses.append(float(pipe.step(x, target=y)))
                    losses.append(float(pipe.evaluate(*data(8)[:1], target=data(8)[1])))
                    losses.append(float(pipe.evaluate(*data(4)[:1], target=data(4)[1])))
            counts.append(recapture.call_count)
    return counts[0], counts[1], counts[2], losses


class Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Tanh(), Tanh()

    def forward(self, x: Tensor, mask: Tensor | None = None, *, double: bool = False) -> Tensor:
        hidden = self.first(x)
        hidden = hidden if mask is None else hidden * mask
        return self.second(hidden) * (2 if double else 1)


class Selecting(nn.Module):
    """Chooses columns by a parameter's values, so that the shape of what follows hangs on them."""

    def __init__(self) -> None:
        super().__init__()
        self.keep = nn.Parameter(torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0]), requires_grad=False)
        self.linear = nn.Linear(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, self.keep.nonzero()[:, 0]])


def selecting(lend: bool) -> tuple[str, dict[str, Any]]:
    """Wrap with 8 rows and step with 4, with parameters lent before or not; returns the error, or the gradients."""
    x, y = data(4)
    model = seeded(lambda: nn.Sequential(Tanh(), Tanh(), Selecting(), Tanh()))
    with wrapped(model, data(8)[0], num_stages=2, n_microbatches=2, schedule="1f1b", wait_seconds=20.0) as pipe:
        try:
            if lend:
                pipe.warmup(x, lend_parameters=True)
                assert all(p.is_meta == (name not in dict(pipe.named_parameters())) for name, p in model.named_parameters())
            pipe.step(x, target=y)
        except Exception as error:
            return str(error), {}
        return "", owned_gradients(pipe)


def flags() -> tuple[int, list[float]]:
    """Lengths, masks, flags and modes that come and go, three times over; how often was recorded, and the losses."""
    long, short = data(4, 7, WIDTH), data(4, 3, WIDTH)
    mask = torch.ones(4, 7, 1).double()
    losses: list[float] = []
    with patch.object(program, "recapture", wraps=program.recapture) as recapture:
        with wrapped(seeded(Flagged), long[0], num_stages=2, n_microbatches=2) as pipe:
            for _ in range(3):
                for (x, y), args, kwargs in (
                    (long, (), {}),
                    (short, (), {}),
                    (long, (mask,), {}),
                    (short, (None,), {"double": True}),
                ):
                    losses.append(float(pipe.step(x, *args, target=y, **kwargs)))
                    losses.append(float(pipe.evaluate(x, *args, target=y, **kwargs)))
        return recapture.call_count, losses


def differ() -> tuple[str, str, float]:
    """The ranks warm up other signatures; returns the error's class and message, and the seconds until it came."""
    with wrapped(chain(4), data(8)[0], num_stages=2, n_microbatches=2) as pipe:
        start = time.monotonic()
        try:
            pipe.warmup(data(4 + rank())[0])
        except Exception as error:
            return type(error).__name__, str(error), time.monotonic() - start
    raise AssertionError("no error was raised")


def selected_gradients() -> dict[str, Any]:
    """The plain model's."""
    x, y = data(4)
    model = seeded(lambda: nn.Sequential(Tanh(), Tanh(), Selecting(), Tanh()))
    F.mse_loss(model(x), y).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}
