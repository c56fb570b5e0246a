"""Put a model back as it was before a forward that should not count: attributes, containers, and the values of buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from fxchimera_passes.capture.state import remembered

__all__ = ["undo_of"]


def undo_of(model: nn.Module, buffers: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Note the state of ``model`` and the values of ``buffers``; the function returned puts them back, as often as it is called."""
    restore = remembered(model)
    kept = [(buffer, buffer.detach().clone()) for buffer in buffers]

    def undo() -> None:
        restore()
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)

    return undo
