"""Sizes as a user writes them: ``"24GiB"``, a number of bytes, or one of these for each rank."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fxchimera.errors import FxChimeraError

__all__ = ["Cap", "caps_of", "parse_bytes", "readable_bytes"]

Cap = int | float | str

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(cap: Cap) -> int:
    """Return a size in bytes; KiB, MiB, GiB, TiB are powers of 1024, KB, MB, GB, TB of 1000.

    >>> parse_bytes("24GiB"), parse_bytes("1.5 kB"), parse_bytes(4096)
    (25769803776, 1500, 4096)

    Raises:
        FxChimeraError: It is not a positive size.
    """
    if isinstance(cap, str):
        found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmgt]?)(i?)b?\s*", cap, re.IGNORECASE)
        if found is None:
            raise FxChimeraError(f'memory must be a size such as "24GiB" or "800 MB", or a number of bytes, got {cap!r}')
        number, power, binary = found.groups()
        size = float(number) * (1024 if binary else 1000) ** _POWERS[power.lower()]
    else:
        size = float(cap)
    if isinstance(cap, bool) or not 1 <= size < 2**62:
        raise FxChimeraError(f"memory must be at least one byte, got {cap!r}")
    return int(size)


def caps_of(memory: Cap | Sequence[Cap] | None, num_ranks: int) -> tuple[int, ...]:
    """Return the cap of every rank in bytes; an empty tuple for None, no cap.

    Raises:
        FxChimeraError: A size cannot be read, or there are not as many as ranks.
    """
    if memory is None:
        return ()
    if isinstance(memory, (int, float, str)):
        return (parse_bytes(memory),) * num_ranks
    if len(memory) != num_ranks:
        raise FxChimeraError(f"memory has {len(memory)} sizes for {num_ranks} ranks; give one for all, or one for each")
    return tuple(parse_bytes(cap) for cap in memory)


def readable_bytes(count: float) -> str:
    """Return a size for people: ``1.5 MiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
