"""The surroundings that a recorded operation ran in: grad mode, autocast, and its named randomness.

A stage's graph calls an operation through :func:`call_in_scope` only where its surroundings differ from the stage's own, so the
generated code reads like the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from fxchimera_passes.captured import NodeInfo, RandomKey
from fxchimera_passes.keyed import keyed_random

__all__ = ["Scope", "call_in_scope", "scope_of"]

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Scope:
    """What to set around one operation; ``grad`` None keeps the grad mode, ``autocast`` is (device type, dtype, enabled)."""

    grad: bool | None = None
    autocast: tuple[str, torch.dtype, bool] | None = None
    random: tuple[RandomKey, ...] = ()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run the body in these surroundings."""
        with ExitStack() as stack:
            if self.grad is not None:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.autocast is not None:
                device, dtype, enabled = self.autocast
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            if self.random:
                stack.enter_context(keyed_random(self.random))
            yield


def scope_of(known: NodeInfo, ambient_grad: bool) -> Scope | None:
    """The scope a node needs in a stage that runs under ``ambient_grad``, None when it needs none."""
    scope = Scope(None if known.grad_enabled == ambient_grad else known.grad_enabled, known.autocast, known.random)
    return None if scope == Scope() else scope


def call_in_scope(scope: Scope, function: Callable[..., _Result], *args: object, **kwargs: object) -> _Result:
    """Call ``function(*args, **kwargs)`` in ``scope``."""
    with scope.entered():
        return function(*args, **kwargs)
