"""The models of the zoo with their batches, and what the plain model gives for them."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fxchimera_passes.structure import flatten

__all__ = ["Sample", "Seen", "buffers_kept", "draws", "gradients", "pieces", "plain_loop", "samples_of"]


class Sample(NamedTuple):
    """A batch for a model; ``target`` holds the tensors that the entry's loss closes over, None when there are none."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    loss_fn: Callable[..., Tensor]


def samples_of(zoo: Any, name: str, rows: int | None) -> tuple[nn.Module, list[Sample]]:
    """Build an entry (the same in every call) with two batches; ``rows`` asks for another batch size than the entry's own."""
    usual, zoo.B = zoo.B, rows or zoo.B
    try:
        _seed(0)
        model, args, kwargs, loss = zoo.ZOO[name].build()
    finally:
        zoo.B = usual
    _seed(1)
    fresh = zoo.fresh_inputs(name, seed=1, batch=rows)
    return model, [_sample(args, kwargs, loss), _sample(*fresh)]


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _sample(args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[[Any], Tensor]) -> Sample:
    """Make the tensors that ``loss`` closes over its target, so that a batch can be divided."""
    if loss.__name__ == "sum_loss":  # it looks for outputs that require a gradient, and in evaluation there is none
        return Sample(args, kwargs, None, mean_square)
    cells = dict(zip(loss.__code__.co_freevars, loss.__closure__ or (), strict=True))
    target = {key: cell.cell_contents for key, cell in cells.items() if isinstance(cell.cell_contents, Tensor)}
    if not target:
        return Sample(args, kwargs, None, loss)

    def loss_fn(output: Any, given: Mapping[str, Tensor]) -> Tensor:
        closure = tuple(types.CellType(given[key]) if key in given else cell for key, cell in cells.items())
        return types.FunctionType(loss.__code__, loss.__globals__, "loss", loss.__defaults__, closure)(output)

    return Sample(args, kwargs, target, loss_fn)


def mean_square(output: Any) -> Tensor:
    """Add up the mean square of every floating-point tensor in ``output``."""
    tensors = [tensor for tensor in flatten(output)[0] if tensor.is_floating_point() or tensor.is_complex()]
    return torch.stack([tensor.abs().float().pow(2).mean() for tensor in tensors]).sum()


@dataclass(slots=True)
class Seen:
    """The loss of a step or of an evaluation, the outputs that the loss was computed of, and the gradients."""

    loss: Tensor
    outputs: list[list[Tensor]]
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


def pieces(sample: Sample, n: int) -> list[Sample]:
    """Divide a batch along the first dimension of its tensors.

    Raises:
        ValueError: they disagree about it, or it does not divide.
    """
    if n == 1:
        return [sample]
    tensors, structure = flatten((sample.args, sample.kwargs, sample.target))
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
    if len(sizes) != 1 or min(sizes) % n or not min(sizes):
        raise ValueError(f"the first dimensions {sorted(sizes)} do not divide by {n}")
    cut = [tensor.chunk(n) for tensor in tensors]
    parts = [structure.rebuild([chunks[i] for chunks in cut]) for i in range(n)]
    return [Sample(args, kwargs, target, sample.loss_fn) for args, kwargs, target in parts]


def plain_loop(model: nn.Module, sample: Sample, n: int, *, backward: bool) -> Seen:
    """Run the plain model over the micro-batches, each counting 1/n."""
    total, outputs = torch.zeros(()), []
    for piece in pieces(sample, n):
        output = model(*piece.args, **piece.kwargs)
        loss = piece.loss_fn(output) if piece.target is None else piece.loss_fn(output, piece.target)
        if backward:
            (loss / n).backward()
        total = total + loss.detach() / n
        outputs.append([tensor.detach().clone() for tensor in flatten(output)[0]])
    return Seen(total, outputs, gradients(model))


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Copy what is in ``.grad``."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def draws(model: nn.Module, sample: Sample) -> bool:
    """Tell whether a forward of the plain model moves a random generator (the model's buffers are put back)."""
    with torch.random.fork_rng(devices=[]), buffers_kept(model):
        before = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())
        model(*sample.args, **sample.kwargs)
        return before != (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()))


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put every buffer back on the way out: the tensor that was there, and its value."""
    tables = [(module, dict(module._buffers)) for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, buffers in tables:
            module._buffers.update(buffers)
        for buffer, value in values:
            buffer.data.copy_(value)
