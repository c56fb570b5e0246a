"""Running statistics of batch norm when the micro-batches of one step are seen by two replicas.

A plain loop updates r <- (1-m) r + m x once a micro-batch, in order.  With two replicas neither sees them all, so each forward
runs on scratch statistics that start at zero, which leaves delta = m x, and the owner applies all deltas in micro-batch order
when the step ends:  r <- (1-m)^calls r + delta.  The result equals the plain loop's up to one rounding.

Deferred statistics are updated once a step instead, by mean and variance of all its rows, as a plain step on the whole batch does:
each micro-batch leaves its mean, its variance and how many numbers a channel has, and the owner joins them.  A layer that a forward
calls several times is updated once, too, by all its calls.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fxchimera.errors import FxChimeraError

__all__ = ["BatchNorm", "Delta", "NormLayer", "apply_deltas", "check_batch_norm", "norm_layers", "on_scratch_statistics"]

BatchNorm = Literal["each", "deferred"]
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Delta:
    """What one micro-batch adds to the statistics of one layer; ``calls`` counts the layer's uses in the micro-batch.

    Of a deferred layer they are the mean and the variance (biased) over all uses, and ``calls`` counts the numbers of a channel.
    """

    mean: torch.Tensor
    var: torch.Tensor
    calls: int

    def on(self, device: torch.device) -> Delta:
        """The same on a device."""
        return self if self.mean.device == device else Delta(self.mean.to(device), self.var.to(device), self.calls)


@dataclass(frozen=True, slots=True)
class NormLayer:
    """A batch-norm layer of a replica under its qualified name in the user's model."""

    name: str
    module: _BatchNorm
    deferred: bool = False

    @property
    def writes(self) -> bool:
        """Tell whether a forward in the module's current mode updates running statistics."""
        return self.module.training and self.module.track_running_stats and self.module.running_mean is not None

    def apply(self, deltas: Mapping[tuple[int, int], Delta]) -> None:
        """Update the running statistics by ``deltas``, by (step, micro-batch)."""
        moments, statistic = sorted(deltas), self.module.running_mean
        if statistic is not None:
            deltas = {moment: delta.on(statistic.device) for moment, delta in deltas.items()}
        if not self.deferred:
            apply_deltas(self.module, [deltas[moment] for moment in moments])
            return
        for _, of_step in groupby(moments, lambda moment: moment[0]):
            _apply_whole(self.module, [deltas[moment] for moment in of_step])


def norm_layers(modules: Mapping[str, nn.Module], *, deferred: bool = False) -> tuple[NormLayer, ...]:
    """List the batch-norm layers inside the given leaf modules, each once, in name order."""
    found: dict[int, NormLayer] = {}
    for prefix, module in sorted(modules.items()):
        for name, child in module.named_modules():
            if isinstance(child, _BatchNorm):
                found.setdefault(id(child), NormLayer(".".join(filter(None, (prefix, name))), child, deferred))
    return tuple(found.values())


@contextlib.contextmanager
def on_scratch_statistics(layers: Sequence[NormLayer]) -> Iterator[dict[str, Delta]]:
    """Run a forward on statistics that start at zero; the dict yielded is filled with the used layers' deltas at the end."""
    deltas: dict[str, Delta] = {}
    saved = [(layer, dict(layer.module._buffers)) for layer in layers if layer.writes]
    for layer, buffers in saved:
        for name, buffer in buffers.items():
            # the count of calls is wanted on the host, which need not wait for it there
            where = torch.device("cpu") if name == "num_batches_tracked" else None
            layer.module._buffers[name] = torch.zeros_like(buffer, device=where) if buffer is not None else None
    try:
        with contextlib.ExitStack() as stack:
            seen = {layer.name: stack.enter_context(_joined_calls(layer.module)) for layer, _ in saved if layer.deferred}
            yield deltas
        for layer, _ in saved:
            delta = seen[layer.name].delta if layer.deferred else _delta(layer.module)
            if delta.calls:  # the micro-batch's path may go around a layer
                deltas[layer.name] = delta
    finally:
        for layer, buffers in saved:
            layer.module._buffers.update(buffers)


def check_batch_norm(batch_norm: str, model: nn.Module, n_microbatches: int) -> None:
    """Warn of the layers that see other batches than in a plain step on the whole batch, unless ``batch_norm`` is "deferred".

    Raises:
        FxChimeraError: ``batch_norm`` is neither "each" nor "deferred".
    """
    if batch_norm not in ("each", "deferred"):
        raise FxChimeraError(f'batch_norm must be "each" or "deferred", got {batch_norm!r}')
    found = norm_layers({"": model})
    names = [repr(layer.name or type(model).__name__) for layer in found if layer.module.training]
    if names and n_microbatches > 1 and batch_norm == "each":
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        warnings.warn(
            f"batch norm in {', '.join(names[:_NAMED])}{more}: each of {n_microbatches} micro-batches is normalised by its own "
            "statistics, and updates the running ones, as in a plain loop over micro-batches, not as in a step on the whole batch. "
            'batch_norm="deferred" updates the running ones once a step, by the whole batch',
            stacklevel=3,
        )


class _Calls:
    """Joins mean and variance of the calls of one layer, whose scratch statistics are those of the last call."""

    def __init__(self) -> None:
        self.delta = Delta(torch.zeros(()), torch.zeros(()), 0)

    def add(self, module: _BatchNorm, given: torch.Tensor) -> None:
        """Take the call on ``given``, which has just ended."""
        mean, var = module.running_mean, module.running_var
        assert mean is not None
        assert var is not None
        count = given.numel() // given.shape[1]
        self.delta = _join([self.delta, Delta(mean.clone(), var * ((count - 1) / count), count)])


@contextlib.contextmanager
def _joined_calls(module: _BatchNorm) -> Iterator[_Calls]:
    """Let the scratch statistics be those of one call, and join the calls."""
    calls, plain, before = _Calls(), module.forward, dict(vars(module))

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = plain(*args, **kwargs)
        with torch.no_grad():
            calls.add(module, args[0] if args else kwargs["input"])
        return output

    module.momentum = 1.0
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        vars(module).update(before)
        if "forward" not in before:
            del module.forward


def _join(deltas: Sequence[Delta]) -> Delta:
    """Mean and variance of several parts together."""
    parts = [delta for delta in deltas if delta.calls]
    if len(parts) < 2:
        return parts[0] if parts else deltas[0]
    count = sum(part.calls for part in parts)
    mean = sum(part.mean * (part.calls / count) for part in parts)
    var = sum((part.var + (part.mean - mean) ** 2) * (part.calls / count) for part in parts)
    assert isinstance(mean, torch.Tensor)
    assert isinstance(var, torch.Tensor)
    return Delta(mean, var, count)


def _apply_whole(module: _BatchNorm, deltas: Sequence[Delta]) -> None:
    """Update ``module``'s running statistics once, by all micro-batches of one step together."""
    mean, var, tracked = module.running_mean, module.running_var, module.num_batches_tracked
    if mean is None or var is None or tracked is None or not deltas:
        return
    with torch.no_grad():
        whole = _join([Delta(delta.mean.to(mean), delta.var.to(var), delta.calls) for delta in deltas])
        tracked.add_(1)
        share = 1.0 / float(tracked) if module.momentum is None else module.momentum
        mean.mul_(1.0 - share).add_(whole.mean, alpha=share)
        var.mul_(1.0 - share).add_(whole.var, alpha=share * whole.calls / max(whole.calls - 1, 1))


def apply_deltas(module: _BatchNorm, deltas: Sequence[Delta]) -> None:
    """Update ``module``'s running statistics with the deltas of one step, given in micro-batch order."""
    mean, var, tracked = module.running_mean, module.running_var, module.num_batches_tracked
    if mean is None or var is None or tracked is None:
        return
    with torch.no_grad():
        for delta in deltas:
            tracked.add_(delta.calls)
            # momentum=None is a cumulative average: the scratch run, whose counter starts at zero, left the plain mean of its calls
            share = delta.calls / float(tracked) if module.momentum is None else 1.0
            keep = 1.0 - share if module.momentum is None else (1.0 - module.momentum) ** delta.calls
            mean.mul_(keep).add_(delta.mean, alpha=share)
            var.mul_(keep).add_(delta.var, alpha=share)


def _delta(module: _BatchNorm) -> Delta:
    mean, var, tracked = module.running_mean, module.running_var, module.num_batches_tracked
    assert mean is not None
    assert var is not None
    assert tracked is not None
    return Delta(mean, var, int(tracked))
