"""Notices a forward that handles torch's generator itself, in order to draw the same numbers again in its backward.

    forward   s = torch.seed(); torch.manual_seed(s); y = dropout(x)       as in reversible networks and
    backward  torch.manual_seed(s); dropout(x) once more                   hand-written checkpointing

Here every random operation draws from a key of its own, not from the generator's stream, so the second draw would differ from the
first and the gradients would be wrong without a word.  Such a forward is refused if it draws at all.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fxchimera_passes.capture.lines import outside_torch, user_line

__all__ = ["seeding_noticed"]

_FUNCTIONS = ("manual_seed", "seed", "get_rng_state", "set_rng_state")


@contextmanager
def seeding_noticed() -> Iterator[list[str]]:
    """Yield a list that is filled with "function() at file:line" for this thread's calls by the user's code."""
    found: list[str] = []
    owner = threading.get_ident()

    def noticed(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == owner and outside_torch(sys._getframe(1)):
                found.append(f"torch.{name}() at {user_line()}")
            return original(*args, **kwargs)

        return call

    originals = [(module, name, getattr(module, name)) for module in (torch, torch.random) for name in _FUNCTIONS]
    for module, name, original in originals:
        setattr(module, name, noticed(name, original))
    try:
        yield found
    finally:
        for module, name, original in originals:
            setattr(module, name, original)
