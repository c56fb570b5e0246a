"""Chimera: two 1F1B pipes in opposite directions over the same ranks (Li and Hoefler, SC'21).

Each rank holds two stages, s of the down pipe and D-1-s of the up pipe.  In unit slots (F = B = 1), the j-th micro-batch of a
pipe's unit of D/2 runs

    F on stage s at slot        s + 2j          every further unit starts 2D slots later
    B on stage s at slot 2D-1 - s + 2j          (direct concatenation, section 3.5)

    D=4, N=4    slot  0  1  2  3  4  5  6  7  8  9
      rank 0          F0 .. F1 f2 b2 f3 b3 B0 .. B1      capitals: down, micro-batches 0 and 1
      rank 1          .. F0 f2 F1 f3 b2 B0 b3 B1 ..      small letters: up, micro-batches 2 and 3
      rank 2          .. f2 F0 f3 F1 B0 b2 B1 b3 ..
      rank 3          f2 .. f3 F0 B0 F1 B1 b2 .. b3

A rank sorts its actions by slot; the sorted list is the schedule and real durations only stretch it.  For even D two actions never
claim one slot: the forwards of the two pipes have opposite parity, so have the backwards, and a forward and a backward of one
parity lie in disjoint ranges.  So nothing has to be merged or resolved.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxchimera.errors import ScheduleError
from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.order import Order
from fxchimera.schedule.placement import Placement, bidirectional

__all__ = ["chimera", "slots"]


def chimera(num_stages: int, n_microbatches: int) -> Order:
    """The Chimera order with one pair of pipes, direct concatenation, for any N; a remainder of N/D is a smaller last unit.

    Excess over N(F+B) for N = K*D and B >= F: (D/2-1)((F+B) + (2K-1)(B-F)); at F = B the bubble is (D-2)/(2N+D-2).  Peak
    activations D/2+1..D.

    Raises:
        ScheduleError: A number is below 1, or D is odd and above 1.
    """
    if num_stages % 2 and num_stages > 1:
        raise ScheduleError(
            f"chimera needs an even number of stages, got num_stages={num_stages}: with an odd number the two directions claim the "
            f"same slot of a rank, and rank {num_stages // 2} would hold stage {num_stages // 2} twice; "
            f'use an even num_stages ({num_stages - 1} or {num_stages + 1}) or schedule="1f1b"'
        )
    placement = bidirectional(num_stages, n_microbatches)
    lists: list[list[tuple[int, Action]]] = [[] for _ in range(num_stages)]
    for slot, action in slots(placement):
        assert action.microbatch is not None
        lists[placement.rank(action.stage, action.microbatch)].append((slot, action))
    ranks = (tuple(action for _, action in sorted(actions, key=lambda item: item[0])) for actions in lists)
    return Order("chimera", placement, tuple(ranks))


def slots(placement: Placement) -> Iterator[tuple[int, Action]]:
    """The closed form: the unit slot of every computation, in no particular order."""
    depth = placement.num_stages
    for pipe in range(len(placement.pipes)):
        for index, microbatch in enumerate(placement.microbatches(pipe)):
            unit, j = divmod(index, max(depth // 2, 1))
            begin = 2 * depth * unit + 2 * j
            for stage in range(depth):
                yield begin + stage, Action(stage, Kind.F, microbatch)
                yield begin + 2 * depth - 1 - stage, Action(stage, Kind.B, microbatch)
