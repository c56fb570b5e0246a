"""Let ``torch.utils.checkpoint`` repeat keyed randomness when it runs a part of the forward again in the backward.

    forward, in a keyed context:   checkpoint(f)  ->  checkpoint(Replay(f, keys from here on))
    backward, no context left:     Replay         ->  f under the same keys

torch's own way, to set the state of the global generator in the backward, restores the user's stream, from which keyed operations
do not draw: the gradients would belong to other masks than the forward used.  And it would do so while another thread draws from
that generator.  So it is switched off where a micro-batch is named, which names all that is drawn.  torch offers no hook here, so
two of its functions are replaced, only while some thread is in a named micro-batch, and act only in such a thread.  Tried on 2.13.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.utils.checkpoint

__all__ = ["Replacement", "Replay"]

_GENERATOR, _FUNCTION = "_checkpoint_without_reentrant_generator", "CheckpointFunction"


class Replay:
    """Calls ``function`` as it is while a keyed context is active, and in a fresh ``context`` when none is."""

    def __init__(
        self, function: Callable[..., Any], active: Callable[[], bool], context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.function, self.active, self.context = function, active, context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        if self.active():
            return self.function(*args, **kwargs)
        with self.context():
            return self.function(*args, **kwargs)


class Replacement:
    """Replaces torch's two checkpoint functions while anyone holds it.

    Args:
        wrap: Makes a replay of a function, or returns it.
        named: Whether all that is drawn at random in this thread has a name.
    """

    def __init__(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], named: Callable[[], bool]) -> None:
        self._wrap, self._named, self._lock, self._holders = wrap, named, threading.Lock(), 0
        self._originals: tuple[Any, Any] = (None, None)

    def hold(self) -> None:
        """Install the replacement unless it is installed."""
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                module = torch.utils.checkpoint
                self._originals = getattr(module, _GENERATOR), getattr(module, _FUNCTION)
                setattr(module, _GENERATOR, self._generator(self._originals[0]))
                setattr(module, _FUNCTION, _Apply(self._originals[1], self))

    def release(self) -> None:
        """Take it away when nobody else holds it."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                for name, original in zip((_GENERATOR, _FUNCTION), self._originals, strict=True):
                    setattr(torch.utils.checkpoint, name, original)

    def arguments(self, function: Callable[..., Any], preserve: bool) -> tuple[Callable[..., Any], bool]:
        """Return what is to be run, and whether torch is to set the global generator in the backward as it is now."""
        return self._wrap(function), preserve and not self._named()

    def _generator(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def generator(function: Callable[..., Any], preserve: bool = True, *args: Any, **kwargs: Any) -> Any:
            return original(*self.arguments(function, preserve), *args, **kwargs)

        return generator


class _Apply:
    """Stands in for torch's reentrant checkpoint function, of which callers use ``apply`` alone."""

    def __init__(self, original: Any, replacement: Replacement) -> None:
        self.original, self.replacement = original, replacement

    def apply(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return self.original.apply(*self.replacement.arguments(function, preserve), *args)
