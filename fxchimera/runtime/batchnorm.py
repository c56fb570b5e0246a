"""Running statistics of batch norm when the micro-batches of one step are seen by two replicas.

A plain loop updates r <- (1-m) r + m x once a micro-batch, in order.  With two replicas neither sees them all, so each forward
runs on scratch statistics that start at zero, which leaves delta = m x, and the owner applies all deltas in micro-batch order
when the step ends:  r <- (1-m)^calls r + delta.  The result equals the plain loop's up to one rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["Delta", "NormLayer", "apply_deltas", "norm_layers", "on_scratch_statistics"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one micro-batch adds to the statistics of one layer; ``calls`` counts the layer's uses in the micro-batch."""

    mean: torch.Tensor
    var: torch.Tensor
    calls: int


@dataclass(frozen=True, slots=True)
class NormLayer:
    """A batch-norm layer of a replica under its qualified name in the user's model."""

    name: str
    module: _BatchNorm

    @property
    def writes(self) -> bool:
        """Tell whether a forward in the module's current mode updates running statistics."""
        return self.module.training and self.module.track_running_stats and self.module.running_mean is not None


def norm_layers(modules: Mapping[str, nn.Module]) -> tuple[NormLayer, ...]:
    """List the batch-norm layers inside the given leaf modules, each once, in name order."""
    found: dict[int, NormLayer] = {}
    for prefix, module in sorted(modules.items()):
        for name, child in module.named_modules():
            if isinstance(child, _BatchNorm):
                found.setdefault(id(child), NormLayer(".".join(filter(None, (prefix, name))), child))
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
        yield deltas
        for layer, _ in saved:
            delta = _delta(layer.module)
            if delta.calls:  # the micro-batch's path may go around a layer
                deltas[layer.name] = delta
    finally:
        for layer, buffers in saved:
            layer.module._buffers.update(buffers)


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
            mean.mul_(keep).add_(delta.mean.to(mean.device), alpha=share)
            var.mul_(keep).add_(delta.var.to(var.device), alpha=share)


def _delta(module: _BatchNorm) -> Delta:
    mean, var, tracked = module.running_mean, module.running_var, module.num_batches_tracked
    assert mean is not None
    assert var is not None
    assert tracked is not None
    return Delta(mean, var, int(tracked))
