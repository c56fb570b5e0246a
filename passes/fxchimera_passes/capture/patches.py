"""Puts the recorder in the way of module calls and of custom autograd functions, for one thread only.

``nn.Module.__call__`` and ``autograd.Function.apply`` belong to the process.  One lock admits one recording at a time; other
threads pass straight through the patch without taking it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

__all__ = ["RECORDING", "CallRule", "patched"]

RECORDING = threading.RLock()
"""Held by the thread that records; the patches are of the whole process."""


class CallRule(Protocol):
    """What happens instead of a module call."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``module(*args, **kwargs)``."""


@contextmanager
def patched(call_rule: CallRule, apply_rule: Callable[..., Any]) -> Iterator[None]:
    """Send this thread's module calls to ``call_rule``, and its calls of ``Function.apply`` to ``apply_rule``.

    ``apply_rule(original, cls, args, kwargs)`` stands for ``cls.apply(*args, **kwargs)``, which ``original`` does.
    """
    owner = threading.get_ident()
    original_call: Any = nn.Module.__call__
    original_apply: Any = vars(torch.autograd.Function)["apply"]

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != owner:
            return original_call(module, *args, **kwargs)
        return call_rule(module, args, kwargs)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        original = original_apply.__get__(None, cls)
        if threading.get_ident() != owner:
            return original(*args, **kwargs)
        return apply_rule(original, cls, args, kwargs)

    with RECORDING:
        nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.__call__ = original_call  # type: ignore[method-assign]
            torch.autograd.Function.apply = original_apply  # type: ignore[method-assign]
