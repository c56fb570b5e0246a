"""What a pipeline is compared with, made by plain torch alone, and how closely.

Two witnesses: the full-batch step, and a loop over the micro-batches (which batch norm needs, as its statistics are those of a
micro-batch).  Nothing of fxchimera is used here.

The tolerance has a floor, a thousandth of the norm of all gradients: the gradient of an attention's key bias is zero in theory,
so its relative error is noise over noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.models import Example

__all__ = [
    "TOLERANCE", "Gradients", "Outcome", "adamw_steps", "assert_bitwise", "assert_close", "assert_same_tensors", "full_batch",
    "gradients_of", "micro_batch_loop", "split",
]  # fmt: skip

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
_FLOOR = 1e-3

Gradients = dict[str, Tensor | None]


class Outcome(NamedTuple):
    """The loss of one step, and the gradients it left, by parameter name."""

    loss: Tensor
    gradients: Gradients


def gradients_of(model: nn.Module) -> Gradients:
    """Return copies of what is in ``.grad``, by the model's own names."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def full_batch(example: Example) -> Outcome:
    """Forward and backward of the plain model on the whole batch; gradients add to what is in ``.grad``."""
    loss = example.loss(example.model(*example.args, **example.kwargs))
    loss.backward()
    return Outcome(loss.detach(), gradients_of(example.model))


def micro_batch_loop(example: Example, n: int) -> Outcome:
    """Forward and backward of the plain model, one micro-batch after the other, each weighted by its rows."""
    pieces = list(split(example, n))
    total = sum(_rows(piece) for piece in pieces)
    loss = torch.zeros(())
    for piece in pieces:
        part = piece.loss(piece.model(*piece.args, **piece.kwargs)) * (_rows(piece) / total)
        part.backward()
        loss = loss + part.detach()
    return Outcome(loss, gradients_of(example.model))


def split(example: Example, n: int) -> Iterator[Example]:
    """Yield ``n`` examples of the same model on consecutive rows; sizes differ by at most one, the larger come first."""
    rows = _rows(example)
    start = 0
    for index in range(n):
        end = start + rows // n + (1 if index < rows % n else 0)
        yield example._replace(
            args=tuple(_cut(value, start, end) for value in example.args),
            kwargs={name: _cut(value, start, end) for name, value in example.kwargs.items()},
            target=_cut(example.target, start, end),
        )
        start = end
    assert start == rows


def adamw_steps(example: Example, steps: int, n: int | None = None) -> list[Tensor]:
    """Train the plain model by AdamW on the same batch, in micro-batches if ``n`` is given; return the losses."""
    optimizer = torch.optim.AdamW(example.model.parameters())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append((full_batch(example) if n is None else micro_batch_loop(example, n)).loss)
        optimizer.step()
    return losses


def assert_close(found: Outcome, expected: Outcome, tolerance: float, loss_tolerance: float | None = None) -> None:
    """Compare the loss, and EVERY gradient relative to its norm with the floor; a missing gradient equals only a missing one."""
    torch.testing.assert_close(found.loss, expected.loss.to(found.loss.dtype), rtol=loss_tolerance or tolerance, atol=0.0)
    assert found.gradients.keys() == expected.gradients.keys()
    whole = sum(float(g.double().square().sum()) for g in expected.gradients.values() if g is not None) ** 0.5
    for name, wanted in expected.gradients.items():
        got = found.gradients[name]
        if wanted is None or got is None:
            assert got is wanted, f"{name}: {got} instead of {wanted}"
            continue
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), name
        error = float((got.double() - wanted.double()).norm())
        bound = tolerance * max(float(wanted.double().norm()), _FLOOR * whole)
        assert error <= bound, f"{name}: the error {error:.3g} is above {bound:.3g}"


def assert_bitwise(found: Outcome, expected: Outcome) -> None:
    """Compare loss and every gradient to the last bit."""
    assert torch.equal(found.loss, expected.loss), f"loss {found.loss!r} instead of {expected.loss!r}"
    assert_same_tensors(found.gradients, expected.gradients)


def assert_same_tensors(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Compare two dicts of tensors (or None) to the last bit."""
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        got = found[name]
        if isinstance(wanted, Tensor):
            assert isinstance(got, Tensor), name
            assert torch.equal(got, wanted), f"{name}: differs by up to {float((got.double() - wanted.double()).abs().max()):.3g}"
        else:
            assert got == wanted, name


def _rows(example: Example) -> int:
    tensors = [value for value in (*example.args, *example.kwargs.values(), example.target) if isinstance(value, Tensor)]
    return tensors[0].shape[0]


def _cut(value: Any, start: int, end: int) -> Any:
    return value[start:end] if isinstance(value, Tensor) else value
