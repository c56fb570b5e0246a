"""The caller's surroundings, so that an action on another thread runs as if the caller had run it."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

__all__ = ["CallerContext", "casts_kept", "without_autocast"]

_T = TypeVar("_T")


@functools.cache
def _device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def without_autocast() -> contextlib.AbstractContextManager[object]:
    """Run a backward as after the caller's autocast region, where torch wants it to run."""
    enabled = [kind for kind in _device_types() if torch.is_autocast_enabled(kind)]
    if not enabled:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    for kind in enabled:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


@contextlib.contextmanager
def casts_kept() -> Iterator[None]:
    """Keep autocast's copies of weights on this thread until :func:`torch.clear_autocast_cache`, whichever regions end inside.

    The copies of all threads are in one table, which a thread that leaves its outermost region empties.  If that is another rank's,
    two uses of a weight read two copies instead of one, and the sum of their gradients rounds otherwise, as chance will have it.
    All micro-batches in flight share the copies, too.
    """
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()


class CallerContext:
    """Grad mode, autocast, default dtype's device, thread count and context variables at the moment of construction.

    A new thread inherits none of torch's, which are thread-local.
    """

    def __init__(self) -> None:
        self._variables = contextvars.copy_context()
        self._grad = torch.is_grad_enabled()
        self._device = torch.get_default_device()
        self._threads = torch.get_num_threads()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
            for kind in _device_types()
        ]

    def run(self, function: Callable[[], _T]) -> _T:
        """Call ``function`` on the present thread under the caller's surroundings; usable from several threads at once."""
        return self._variables.copy().run(self._enter, function)

    def _enter(self, function: Callable[[], _T]) -> _T:
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._grad))
            if self._device != torch.get_default_device():
                stack.enter_context(self._device)
            for kind, dtype, enabled, cache in self._autocast:
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            return function()
