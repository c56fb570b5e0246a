"""The orders a user can ask for by name."""

from __future__ import annotations

from collections.abc import Callable

from fxchimera.errors import ScheduleError
from fxchimera.schedule.action import Kind
from fxchimera.schedule.chimera import chimera, chimera_doubling, chimera_halving
from fxchimera.schedule.continuous import continuous
from fxchimera.schedule.dualpipe import dualpipe, dualpipev
from fxchimera.schedule.gpipe import gpipe
from fxchimera.schedule.interleaved import interleaved_one_f_one_b
from fxchimera.schedule.one_f_one_b import one_f_one_b
from fxchimera.schedule.order import Order
from fxchimera.schedule.v_half import v_half
from fxchimera.schedule.zbv import zbv
from fxchimera.schedule.zero_bubble import zb_h1

__all__ = ["forward_only", "make_order", "schedules"]

_TORCHS = {"interleaved1f1b": "interleaved-1f1b", "zbvzerobubble": "zbv"}  # torch's names, where they are not ours
_BACKWARD = (Kind.B, Kind.I, Kind.W, Kind.SEND_B, Kind.RECV_B, Kind.SEND_G, Kind.RECV_G)


def schedules() -> dict[str, Callable[[int, int], Order]]:
    """The families by name: each takes the numbers of ranks D and of micro-batches N.

    Interleaved 1F1B, ZBV, V-Half and DualPipeV cut the model into 2D stages, two a rank; the others into D.
    """
    return {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "chimera": chimera,
        "chimera-doubling": chimera_doubling,
        "chimera-halving": chimera_halving,
        "chimera-4": lambda num_stages, n_microbatches: chimera(num_stages, n_microbatches, pairs=2),
        "continuous": lambda num_stages, n_microbatches: continuous(num_stages, n_microbatches),
        "interleaved-1f1b": lambda num_stages, n_microbatches: interleaved_one_f_one_b(num_stages, n_microbatches),
        "zb-h1": zb_h1,
        "zbv": lambda num_stages, n_microbatches: zbv(num_stages, n_microbatches),
        "v-half": v_half,
        "dualpipe": dualpipe,
        "dualpipev": dualpipev,
    }


def make_order(schedule: str, num_stages: int, n_microbatches: int) -> Order:
    """The compute-only order of a family, by name (upper or lower case), torch's "Interleaved1F1B" and "ZBVZeroBubble" included.

    With one stage every family is the same: forward and backward of one micro-batch after the other.

    Args:
        schedule: The family's name.
        num_stages: Ranks D; the order's placement tells into how many stages it cuts the model (D, or 2D with two chunks a rank).
        n_microbatches: Micro-batches N of a step, all pipes together.

    Raises:
        ScheduleError: The name is unknown, a number is below 1, or the family refuses the number of stages.
    """
    known = schedules()
    name = _TORCHS.get(schedule.lower(), schedule.lower())
    if name not in known:
        if name == "auto":
            raise ScheduleError("'auto' is a search, not a family: it needs costs; call auto(num_ranks, n_microbatches, costs)")
        raise ScheduleError(f"unknown schedule {schedule!r}; the schedules are {', '.join(map(repr, known))}, and 'auto'")
    if num_stages == 1:
        plain = one_f_one_b(1, n_microbatches)
        return Order(name, plain.placement, plain.ranks)
    return known[name](num_stages, n_microbatches)


def forward_only(order: Order) -> Order:
    """The forwards of an order, in the same order: for evaluation.  Of a lowered order the refresh of the mirrors stays too."""
    ranks = (tuple(action for action in actions if action.kind not in _BACKWARD) for actions in order.ranks)
    return Order(f"{order.name} forward", order.placement, tuple(ranks))
