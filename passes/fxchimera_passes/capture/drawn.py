"""A number drawn at random and read into Python: what matters is the answer to ``number < 0.3``, not the number.

Stochastic depth and layer drop read a fresh number in every forward.  A recording that held for this number only would hold
never again, so the number notes what it is asked: a comparison becomes a guard on its answer, any other use one on the number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

__all__ = ["Drawn"]

Ask = Callable[[Callable[[float], Any]], None]


class Drawn(float):
    """A float that calls ``ask(question)`` for every question it answers; ``question`` maps another draw to its answer."""

    __slots__ = ("_ask",)
    _ask: Ask

    def __new__(cls, value: float, ask: Ask) -> Drawn:
        """Make the number ``value``."""
        made = super().__new__(cls, value)
        made._ask = ask
        return made

    def plain(self) -> float:
        """Return the number itself, which the recording hangs on from now on."""
        self._ask(float.__pos__)
        return float.__pos__(self)

    def __hash__(self) -> int:
        return hash(self.plain())


def _comparison(name: str) -> Callable[[Drawn, Any], Any]:
    compare = getattr(operator, name)

    def compared(self: Drawn, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return getattr(float, name)(self.plain(), other)
        limit = other.plain() if isinstance(other, Drawn) else other
        self._ask(lambda value: compare(value, limit))
        return compare(float.__pos__(self), limit)

    return compared


def _use(name: str) -> Callable[..., Any]:
    function = getattr(float, name)
    return lambda self, *others: function(self.plain(), *others)


for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"):
    setattr(Drawn, _name, _comparison(_name))
for _name in (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__floordiv__"),
    *("__rfloordiv__", "__mod__", "__rmod__", "__divmod__", "__rdivmod__", "__pow__", "__rpow__", "__neg__", "__pos__", "__abs__"),
    *("__int__", "__float__", "__bool__", "__round__", "__trunc__", "__floor__", "__ceil__", "__format__", "__repr__"),
):
    setattr(Drawn, _name, _use(_name))
