"""Take the tensors out of any Python object and put others in their place.

torch's pytree sees registered containers only; real models pass dataclasses, ``ModelOutput``, caches and objects with
``__slots__`` between their layers, so a :class:`Structure` walks those too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Structure", "flatten"]


@dataclass(frozen=True, slots=True)
class Structure:
    """The shape of an object without its tensors; ``rebuild(tensors)`` makes a fresh object with these tensors in it."""

    spec: Any
    count: int

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Make a new object of this structure that holds ``tensors`` (``count`` of them, in flatten order)."""
        raise NotImplementedError


def flatten(value: Any) -> tuple[list[torch.Tensor], Structure]:
    """Return the tensors inside ``value``, in a fixed order, and the structure around them."""
    raise NotImplementedError
