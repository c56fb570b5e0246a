"""The functions that a captured graph calls besides torch's own.

``after`` orders a read behind a write, ``rebuild`` makes an argument that is no plain container, ``reached`` reads a tensor out
of a container that a call has filled, ``rebind`` puts a new tensor in a buffer's place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxchimera_passes.structure import Path, Structure, follow

__all__ = ["FunctionApply", "after", "reached", "rebind", "rebuild"]


def after(tensor: Tensor, write: Any) -> Tensor:
    """Return ``tensor`` as it is once the node ``write`` has written to it."""
    return tensor


def rebuild(structure: Structure, *tensors: Tensor) -> Any:
    """Make a fresh object of ``structure`` around ``tensors``."""
    return structure.rebuild(tensors)


def reached(container: Any, path: Path, call: Any) -> Tensor:
    """Return the tensor at ``path`` of ``container`` once the node ``call`` has filled it."""
    found: Tensor = follow(container, path)
    return found


def rebind(buffer: Tensor, value: Tensor) -> Tensor:
    """Write ``value`` into ``buffer``; stands for ``module.buffer = value``, which a graph cannot do."""
    with torch.no_grad():
        return buffer.copy_(value)


class FunctionApply:
    """Calls one ``torch.autograd.Function``; its own backward stays as it is."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.__name__ = f"apply_{function.__name__}"
        self.__qualname__ = f"apply_{function.__module__}.{function.__qualname__}"
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the function."""
        return self.function.apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionApply) and other.function is self.function

    def __hash__(self) -> int:
        return hash(self.function)
