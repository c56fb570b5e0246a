"""moves.py and shop.py compiled by numba; imported only where numba is installed."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from fxchimera.schedule import moves, shop

__all__ = ["prepare"]


def prepare(lists: shop.Shop, numbers: list[float], best: list[list[int]]) -> tuple[Any, shop.Shop, Any, Any]:
    """The compiled annealing, and its arguments as arrays."""
    arrays = shop.Shop(*(np.array(field) for field in lists))
    return _anneal(), arrays, np.array(numbers), np.array(best)


def _anneal() -> Any:
    """Compiles the functions bottom up, each with the names of the already compiled ones in its globals."""
    names: dict[str, Any] = {"NEVER": shop.NEVER, "math": moves.math, "Shop": shop.Shop, "Any": Any}
    for function in (
        shop.retime,
        moves.accept,
        moves.keep,
        moves.critical,
        moves.holds,
        moves.fits,
        moves.slide,
        moves.fuse,
        moves.divide,
        moves.toggle,
        moves.shift,
        moves.anneal,
    ):
        names[function.__name__] = numba.njit(_rebound(function, names))
    return names["anneal"]


def _rebound(function: Any, names: dict[str, Any]) -> Any:
    """The function with other globals, so that it calls compiled functions and the module keeps its plain ones."""
    return type(function)(function.__code__, names, function.__name__, function.__defaults__)
