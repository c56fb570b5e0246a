"""Even draws of Python's and numpy's that give one number: for planning, the path that leaves nothing out is wanted.

Stochastic depth that asks ``random.random() < 0.1`` leaves out other layers each time.  As torch's even draws (``reads``), these
then give ``lean``, near 1 or 0, and of the two paths the one that reads more parameters is planned for.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

__all__ = ["leaning"]

_EVEN: tuple[tuple[Any, str], ...] = (
    (random, "random"), (random, "uniform"),
    (np.random, "random"), (np.random, "random_sample"), (np.random, "rand"), (np.random, "uniform"),
)  # fmt: skip


@contextmanager
def leaning(lean: float | None) -> Iterator[None]:
    """Inside, in this thread, even draws by these functions give ``lean`` of their range; None changes nothing."""
    with ExitStack() as stack:
        for owner, name in _EVEN if lean is not None else ():
            original = getattr(owner, name)
            setattr(owner, name, _leaning(original, lean or 0.0, threading.get_ident(), ranged=name == "uniform"))
            stack.callback(setattr, owner, name, original)
        yield


def _leaning(original: Callable[..., Any], lean: float, thread: int, *, ranged: bool) -> Callable[..., Any]:
    def draw(*args: Any, **kwargs: Any) -> Any:
        drawn = original(*args, **kwargs)  # so that it is noticed as a draw
        if threading.get_ident() != thread:
            return drawn
        low, high = _range(*args, **kwargs) if ranged else (0.0, 1.0)
        return drawn * 0.0 + (low + (high - low) * lean)

    return draw


def _range(low: Any = 0.0, high: Any = 1.0, size: Any = None, *, a: Any = None, b: Any = None) -> tuple[Any, Any]:
    """What lies between the ends that a call of ``uniform`` names, Python's ``a`` and ``b`` or numpy's ``low`` and ``high``."""
    return low if a is None else a, high if b is None else b
