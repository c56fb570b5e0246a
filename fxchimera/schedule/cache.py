"""Orders that a thorough search found, on disk, so that the half minute is spent once.

One JSON file an order, named by a hash of everything that the search depends on: numbers, costs rounded to six digits, limits,
budget, seed and the version of the search.  The order itself is its CSV.  A file is believed only after it has been read, checked
and measured again; anything wrong with it is a miss.  Nothing in a file is ever executed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from pathlib import Path

from fxchimera.errors import ScheduleError
from fxchimera.schedule.facts import complete
from fxchimera.schedule.order import Order, read_csv
from fxchimera.schedule.placement import Placement
from fxchimera.schedule.profile import Costs

__all__ = ["cache_folder", "key_of", "load", "store"]

_VERSION = 3  # of the search: another number makes all stored orders misses
_LARGEST = 64 * 1024 * 1024


def cache_folder() -> Path:
    """``$FXCHIMERA_CACHE``, or ``fxchimera/orders`` in the user's cache folder (``$XDG_CACHE_HOME`` or ``~/.cache``)."""
    own = os.environ.get("FXCHIMERA_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fxchimera" / "orders"


def key_of(costs: Costs, *others: object) -> str:
    """A name for a search: a hash of its costs, rounded to six digits, and of everything else it depends on."""
    numbers = {
        field.name: _rounded(getattr(costs, field.name)) for field in dataclasses.fields(costs) if not field.name.startswith("sync")
    }
    return hashlib.sha256(repr((_VERSION, sorted(numbers.items()), others)).encode()).hexdigest()


def load(folder: Path, key: str) -> tuple[str, Order] | None:
    """The shape's name and the order stored under a key; None where there is none that can be believed."""
    path = folder / f"{key}.json"
    try:
        if path.stat().st_size > _LARGEST:
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        pipes = tuple(tuple(int(rank) for rank in ranks) for ranks in found["pipes"])
        place = Placement(len(pipes[0]), pipes, tuple(int(pipe) for pipe in found["pipe_of"]))
        order = read_csv(str(found["csv"]), place, str(found["name"]))
        complete(order)
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError, ScheduleError):
        return None
    return str(found["shape"]), order


def store(folder: Path, key: str, shape: str, order: Order) -> None:
    """Stores an order, whole or not at all; a folder that cannot be written is left alone."""
    place = order.placement
    text = json.dumps(
        {"shape": shape, "name": order.name, "pipes": place.pipes, "pipe_of": place.pipe_of, "csv": order.to_csv()}, indent=0
    )
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).replace(folder / f"{key}.json")
        except OSError:
            Path(name).unlink(missing_ok=True)


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return tuple(_rounded(item) for item in value) if isinstance(value, tuple) else value
