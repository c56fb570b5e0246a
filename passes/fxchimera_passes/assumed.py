"""A value of the forward's that the recording could not know: it took an answer, and the graph checks it.

    y = layer(x) --- y.mean() > 0 --- check "True"          if y.mean() > 0:   was recorded as if the answer were True

The check goes on either way, because a wrong path still has legal shapes: it tells the collector of the present forward the answer
it found, and whoever collects throws the whole run away.  Nobody collecting means that nobody would notice, so then it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fxchimera_passes.captured import Answer, Assumption
from fxchimera_passes.errors import CaptureError

__all__ = ["Check", "collecting"]

_FOUND: ContextVar[dict[int, Answer] | None] = ContextVar("fxchimera_answers", default=None)


@contextmanager
def collecting() -> Iterator[dict[int, Answer]]:
    """Collect the true answers of wrong assumptions, by ordinal, while one forward runs in this thread.

    The smallest ordinal's is the answer to trust: what was computed after it may be garbage.
    """
    found: dict[int, Answer] = {}
    token = _FOUND.set(found)
    try:
        yield found
    finally:
        _FOUND.reset(token)


class Check:
    """Computes one answer again, ``function(*args, **kwargs)``, and compares it with ``assumption``."""

    def __init__(self, function: Callable[..., Any], assumption: Assumption) -> None:
        self.function, self.assumption = function, assumption
        # names in generated code; equal for all, so that recordings of two paths can be compared node by node
        self.__name__ = "check_assumed"
        self.__qualname__ = "check_assumed"
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Compare.

        Raises:
            CaptureError: the answer is another, and nobody collects.
        """
        answer = self.function(*args, **kwargs)
        known = self.assumption
        if answer == known.answer:
            return
        found = _FOUND.get()
        if found is None:
            raise CaptureError(
                f"{known.description} at {known.line} gives {answer!r}, but the graph was recorded for {known.answer!r}: record "
                "the model again, or run it through a pipeline, which does that by itself"
            )
        found.setdefault(known.ordinal, answer)
