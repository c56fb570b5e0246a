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

With f pairs of pipes (section 3.6) a unit of a pipe has D/2f micro-batches and pair k is the first one turned by k*D/f ranks.

Forward doubling (section 3.5) fills the waits that direct concatenation leaves where B > F: a pipe's unit has D micro-batches, the
forwards of 2i and 2i+1 share slot s + 2i, the backward of j has slot 2D-1-s + 2j, and units follow each other after 3D slots.
Backward halving is the same order on micro-batches of half the size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fxchimera.errors import ScheduleError
from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.order import Order
from fxchimera.schedule.placement import Placement, bidirectional, mirrored_pairs

__all__ = ["chimera", "chimera_doubling", "chimera_halving", "slots"]


def chimera(num_stages: int, n_microbatches: int, pairs: int = 1) -> Order:
    """The Chimera order with direct concatenation, for any N; a remainder of N/D is a smaller last unit.

    Excess over N(F+B) with one pair, N = K*D and B >= F: (D/2-1)((F+B) + (2K-1)(B-F)); at F = B the bubble is (D-2)/(2N+D-2).  One
    unit with f pairs: 2(D/2f-1)B.  Peak activations D-D/2f+1..D.

    Raises:
        ScheduleError: A number is below 1, D is odd and above 1, or the pairs do not divide D/2.
    """
    _even(num_stages)
    one = pairs == 1
    placement = bidirectional(num_stages, n_microbatches) if one else mirrored_pairs(num_stages, n_microbatches, pairs)
    return _sorted("chimera" if one else f"chimera-{2 * pairs}", placement, slots(placement, pairs))


def chimera_doubling(num_stages: int, n_microbatches: int) -> Order:
    """The Chimera order with forward doubling, for any N; holds up to twice the activations.

    Excess over N(F+B) for U units of 2D: (D/2-1)(F+B) where F <= B <= 2F, (D/2-1)((F+B) + (2U-2)(B-2F)) where B > 2F.

    Raises:
        ScheduleError: A number is below 1, or D is odd and above 1.
    """
    _even(num_stages)
    placement = bidirectional(num_stages, n_microbatches)
    return _sorted("chimera-doubling", placement, _doubled(placement))


def chimera_halving(num_stages: int, n_microbatches: int) -> Order:
    """The Chimera order with backward halving; N counts the micro-batches of the backwards, half as large as direct's.

    The paper's evaluation runs it as doubling with half the micro-batch: forwards of a pair run one after the other.

    Raises:
        ScheduleError: As :func:`chimera_doubling`.
    """
    order = chimera_doubling(num_stages, n_microbatches)
    return Order("chimera-halving", order.placement, order.ranks)


def slots(placement: Placement, pairs: int = 1) -> Iterator[tuple[int, Action]]:
    """The closed form: the unit slot of every computation, in no particular order."""
    depth = placement.num_stages
    for pipe in range(len(placement.pipes)):
        for index, microbatch in enumerate(placement.microbatches(pipe)):
            unit, j = divmod(index, max(depth // (2 * pairs), 1))
            begin = 2 * depth * unit + 2 * j
            for stage in range(depth):
                yield begin + stage, Action(stage, Kind.F, microbatch)
                yield begin + 2 * depth - 1 - stage, Action(stage, Kind.B, microbatch)


def _doubled(placement: Placement) -> Iterator[tuple[int, Action]]:
    depth = placement.num_stages
    for pipe in range(len(placement.pipes)):
        for index, microbatch in enumerate(placement.microbatches(pipe)):
            unit, j = divmod(index, depth)
            begin = 3 * depth * unit
            for stage in range(depth):
                yield begin + stage + 2 * (j // 2), Action(stage, Kind.F, microbatch)
                yield begin + 2 * depth - 1 - stage + 2 * j, Action(stage, Kind.B, microbatch)


def _sorted(name: str, placement: Placement, items: Iterable[tuple[int, Action]]) -> Order:
    """Every rank's actions by slot."""
    lists: list[list[tuple[int, Action]]] = [[] for _ in range(placement.num_ranks)]
    for slot, action in items:
        assert action.microbatch is not None
        lists[placement.rank(action.stage, action.microbatch)].append((slot, action))
    ranks = (tuple(action for _, action in sorted(actions, key=lambda item: item[0])) for actions in lists)
    return Order(name, placement, tuple(ranks))


def _even(num_stages: int) -> None:
    if num_stages % 2 and num_stages > 1:
        raise ScheduleError(
            f"chimera needs an even number of stages, got num_stages={num_stages}: with an odd number the two directions claim the "
            f"same slot of a rank, and rank {num_stages // 2} would hold stage {num_stages // 2} twice; "
            f'use an even num_stages ({num_stages - 1} or {num_stages + 1}) or schedule="1f1b"'
        )
