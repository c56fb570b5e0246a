"""Interleaved 1F1B: several chunks a rank, so that a micro-batch passes every rank several times (Narayanan et al., 2021).

Stage s is on rank s mod D.  Micro-batches go in groups of about D: a rank runs a whole group through one chunk, then through its
next chunk; backwards take the chunks the other way round.  Rank r warms up with 2(D-1-r) + (v-1)D forwards, then alternates.

    D=2, v=2, N=2     rank 0   0F0 0F1 2F0 2F1 .. 2B0 .. 2B1 0B0 0B1      (stages 0 and 2)
                      rank 1   .. 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1         (stages 1 and 3)

Bubble (D-1)(F+B)/v where N is a multiple of D.
"""

from __future__ import annotations

import itertools

from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.order import Order
from fxchimera.schedule.placement import interleaved

__all__ = ["interleaved_one_f_one_b"]


def interleaved_one_f_one_b(num_ranks: int, n_microbatches: int, chunks: int = 2) -> Order:
    """The interleaved 1F1B order, for any N: groups then differ by at most one micro-batch.

    Raises:
        ScheduleError: A number is below 1.
    """
    placement = interleaved(num_ranks, chunks, n_microbatches)
    rounds = max(1, n_microbatches // num_ranks)
    bounds = [n_microbatches * number // rounds for number in range(rounds + 1)]
    groups = [range(low, high) for low, high in itertools.pairwise(bounds)]
    ranks = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * chunks, num_ranks)
        forwards = [Action(stage, Kind.F, m) for group in groups for stage in stages for m in group]
        backwards = [Action(stage, Kind.B, m) for group in groups for stage in reversed(stages) for m in group]
        warmup = min((chunks - 1) * max(map(len, groups)) + 2 * (num_ranks - 1 - rank), len(forwards))
        actions = forwards[:warmup]
        for number, backward in enumerate(backwards):
            actions += [*forwards[warmup + number : warmup + number + 1], backward]
        ranks.append(tuple(actions))
    return Order("interleaved-1f1b", placement, tuple(ranks))
