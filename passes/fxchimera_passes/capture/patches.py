"""Puts the recorder in the way of module calls and of custom autograd functions, for one thread only.

``nn.Module.__call__`` and ``autograd.Function.apply`` belong to the process.  One lock admits one recording at a time; other
threads pass straight through the patch without taking it.

``step = MyFunction.apply`` is the usual way to write an autograd function, and such a name holds torch's own function object.
So that object stays and gets other code while a recording runs.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from fxchimera_passes._torch import vmap_run

__all__ = ["RECORDING", "CallRule", "patched"]

RECORDING = threading.RLock()
"""Held by the thread that records; the patches are of the whole process."""


class CallRule(Protocol):
    """What happens instead of a module call."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``module(*args, **kwargs)``."""


@contextmanager
def patched(call_rule: CallRule, apply_rule: Callable[..., Any], vmap_rule: Callable[..., Any]) -> Iterator[None]:
    """Send this thread's module calls to ``call_rule``, its calls of ``Function.apply`` and of vmapped functions to the others.

    ``apply_rule(original, cls, args, kwargs)`` stands for ``cls.apply(*args, **kwargs)``, which ``original`` does;
    ``vmap_rule(original, args, kwargs)`` for a call of a function that ``torch.vmap`` made.
    """
    owner = threading.get_ident()
    original_call: Any = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != owner:
            return original_call(module, *args, **kwargs)
        return call_rule(module, args, kwargs)

    def vmap(*args: Any, **kwargs: Any) -> Any:
        return vmap_rule(original_vmap, args, kwargs) if threading.get_ident() == owner else original_vmap(*args, **kwargs)

    original_vmap = vmap_run()
    with RECORDING, _applied(lambda: threading.get_ident() == owner, apply_rule):
        nn.Module.__call__ = call  # type: ignore[method-assign]
        vmap_run(vmap)
        try:
            yield
        finally:
            vmap_run(original_vmap)
            nn.Module.__call__ = original_call  # type: ignore[method-assign]


@contextmanager
def _applied(ours: Callable[[], bool], rule: Callable[..., Any]) -> Iterator[None]:
    """Run ``rule`` in the place of torch's ``Function.apply`` where ``ours()``, whatever name it is called by."""
    function = vars(torch.autograd.Function)["apply"].__func__
    code, defaults = function.__code__, function.__kwdefaults__
    plain = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)

    def instead(cls: Any, args: Any, kwargs: Any) -> Any:
        return rule(functools.partial(plain, cls), cls, args, kwargs) if ours() else plain(cls, *args, **kwargs)

    function.__kwdefaults__ = {**(defaults or {}), "fxchimera_rule": instead}
    function.__code__ = _redirection(torch.autograd.Function)
    try:
        yield
    finally:
        function.__code__ = code
        function.__kwdefaults__ = defaults


def _redirection(__class__: type) -> types.CodeType:
    """Code with the same free variable as that of ``Function.apply``, which calls the rule in its own keyword default."""

    def apply(cls: Any, *args: Any, fxchimera_rule: Any = None, **kwargs: Any) -> Any:
        assert __class__ is not None
        return fxchimera_rule(cls, args, kwargs)

    return apply.__code__
