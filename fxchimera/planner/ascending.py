"""The same order with the micro-batches of every stage in ascending turn, which modules that keep state between calls need.

    a stage as a search left it          F0 F2 F1 I0 B2 I1 W1 W0
    its operations, numbered in turn     F0 F1 F2 I0 B1 I2 W0 W2

All micro-batches of a pipe cost the same on a stage, so only the numbers change: what began as the stage's k-th forward
(backward) had k results of the stage before (after) to choose from, hence the k-th of those was there.  Nothing ends later, and
no rank holds more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.order import Order

__all__ = ["ascending"]


def ascending(order: Order) -> Order:
    """Number the operations of every stage in the order in which they run; ``order`` holds computations only."""
    return Order(order.name, order.placement, tuple(tuple(_renumbered(order, rank)) for rank in range(order.placement.num_ranks)))


def _renumbered(order: Order, rank: int) -> Iterator[Action]:
    place = order.placement
    replicas = place.replicas(rank)
    forwards = {replica: iter(place.microbatches(replica[0])) for replica in replicas}
    backwards = {replica: iter(place.microbatches(replica[0])) for replica in replicas}
    waiting: dict[tuple[int, int], deque[int]] = {replica: deque() for replica in replicas}
    for action in order.ranks[rank]:
        assert action.microbatch is not None  # a computation
        replica = place.pipe_of[action.microbatch], action.stage
        if action.kind is Kind.W:
            number = waiting[replica].popleft()
        else:
            number = next((forwards if action.kind is Kind.F else backwards)[replica])
        if action.kind is Kind.I:
            waiting[replica].append(number)
        yield Action(action.stage, action.kind, number)
