"""The best order that can be found in a time budget, for any costs, ranks and micro-batches.

    every shape that is allowed      its published orders that fit the cap; list rules (portfolio.py)
    those that may still be best     built operation by operation, several ways at a time (beam.py)
    the best few of all              annealed for a short while (moves.py)
    the best of those                annealed with the rest of the budget

A shape whose proven bound is above what was found already is left out, and the search ends early when a bound is reached.  As the
published orders take part, the result is never worse than any of them within the same limits.  Where splitting a backward has a
price, so does what a search without the price finds in a part of the budget: it is never worse than that at the true price either.

The budget is counted in operations looked at, a million of which take about a second of one core; so the result depends on the
arguments alone, not on the machine, its load, the unit of the costs or Python's hash seed.  Where the budget is too small even for
the published orders (32 ranks, 256 micro-batches, a second) they are made nevertheless, and the best of them is returned: at most
about twice the budget.
"""

from __future__ import annotations

import math
from pathlib import Path

from fxchimera.errors import ScheduleError
from fxchimera.schedule.cache import cache_folder, key_of, load, store
from fxchimera.schedule.limits import Found, Limits
from fxchimera.schedule.profile import Costs
from fxchimera.schedule.search import Search

__all__ = ["auto"]

_PER_SECOND = 1_200_000  # operations that the annealing looks at in a second
_DEFAULT_SECONDS, _THOROUGH_SECONDS = 1.0, 30.0


def auto(
    num_ranks: int,
    n_microbatches: int,
    costs: Costs,
    limits: Limits | None = None,
    *,
    search: str = "default",
    seconds: float | None = None,
    seed: int = 0,
    cache: bool | Path = True,
) -> Found:
    """The best order found for given costs.

    Args:
        num_ranks: Ranks D.
        n_microbatches: Micro-batches N of a step.
        costs: Seconds of D stages; shapes with two chunks a rank take every stage as two equal ones.  Or of 2D stages, which only
            those shapes can run.
        limits: Memory, copies of the weights, chunks, and whether backwards may be split; :class:`Limits`' defaults when None.
        search: ``"default"`` (about a second) or ``"thorough"`` (half a minute; one where splitting a backward has a price).
        seconds: The budget in seconds of one core, instead of the level's.
        seed: Of the random part.
        cache: Whether a thorough search's order is kept on disk (cache.py), or in which folder.

    Raises:
        ScheduleError: The numbers do not fit each other, or no order fits into the limits.
    """
    if search not in ("default", "thorough"):
        raise ScheduleError(f'search must be "default" or "thorough", got {search!r}')
    if num_ranks < 1:
        raise ScheduleError(f"num_ranks must be at least 1, got {num_ranks}")
    if len(costs.forward) not in (num_ranks, 2 * num_ranks):
        raise ScheduleError(
            f"the costs cover {len(costs.forward)} stages, and there are {num_ranks} ranks; give one entry a rank, or two"
        )
    given = seconds if seconds is not None else _DEFAULT_SECONDS if search == "default" else _THOROUGH_SECONDS
    if not 0 <= given < math.inf:
        raise ScheduleError(f"seconds must be finite and not negative, got {given}")
    run = Search(
        num_ranks, n_microbatches, costs, limits or Limits(), int(given * _PER_SECOND), seed, thorough=search == "thorough"
    )
    if search == "default" or not cache:
        return run.go()
    key = key_of(costs, num_ranks, n_microbatches, run.limits, run.budget, seed)
    return _kept(run, cache if isinstance(cache, Path) else cache_folder(), key)


def _kept(run: Search, folder: Path, key: str) -> Found:
    """The stored result, or a new one, stored."""
    found = run.known(load(folder, key))
    if found is None:
        found = run.go()
        store(folder, key, found.shape, found.order)
    return found
