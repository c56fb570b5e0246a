"""Notices what a forward does to Python's and numpy's global generators, which no mode of torch can see.

Threads share these generators, so a module that draws from them, or seeds them, must run alone and gets a key.  Draws show in the
generators' states.  Seeding may not: ``np.random.seed(0)`` changes nothing where 0 was the last seed.  So what runs begins with a
second normal number waiting in both generators, as after a first ``random.gauss()``, which any seeding drops.  Nor does a state
show that was put back after the draws, so the functions that set one are noticed when they are called.
"""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from fxchimera_passes.hostrandom import HostStates

__all__ = ["HostDraws"]

_WAITING = 0.5  # the second normal number, of which there is no other trace than that it is there
_SETTERS = ((random, "seed"), (random, "setstate"), (np.random, "seed"), (np.random, "set_state"))
_NAMES = {random: "random", np.random: "numpy.random"}


class HostDraws:
    """What was done to the global generators of Python and numpy since they were last looked at.

    It changes their states: to be used where they are put back, in ``generators_untouched``.
    """

    def __init__(self) -> None:
        self._set: set[str] = set()
        _mark()
        self._last = _states()

    def moved(self) -> list[str]:
        """Name the generators that were drawn from or seeded since the last call, as far as that is known."""
        before, self._last = self._last, _states()
        found = [name for name, state in self._last.items() if state != before[name] or name in self._set]
        self._set.clear()
        return found

    @contextmanager
    def aside(self) -> Iterator[Callable[[], list[str]]]:
        """Inside, nothing is drawn from the caller, whose states are put back; yields :meth:`moved` for the inside."""
        states = HostStates()
        before, noticed = self._last, frozenset(self._set)
        _mark()
        self.moved()
        try:
            yield self.moved
        finally:
            states.restore()
            self._last, self._set = before, set(noticed)

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Inside, notice this thread's calls of the functions that set a state."""
        owner = threading.get_ident()
        with ExitStack() as stack:
            for module, name in _SETTERS:
                original = getattr(module, name)
                stack.callback(setattr, module, name, original)
                setattr(module, name, self._noticed(original, _NAMES[module], owner))
            yield

    def _noticed(self, original: Callable[..., Any], name: str, owner: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == owner:
                self._set.add(name)
            return original(*args, **kwargs)

        return call


def _states() -> dict[str, Any]:
    return {"random": random.getstate(), "numpy.random": pickle.dumps(np.random.get_state(legacy=False))}


def _mark() -> None:
    version, internal, _ = random.getstate()
    random.setstate((version, internal, _WAITING))
    np.random.set_state({**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": _WAITING})
