"""Add the messages to a compute-only order, by projection.

Simulate the order and take its computations in the one order in which they end.  When one ends, append its SEND to its rank's
list and the RECV to the peer's list in the same moment:

    end of 0F0           rank 0   0F0 0SEND_F0 0F1 ...
                         rank 1   1RECV_F0 ...

Every list is then a projection of one linear order in which a message is a single event.  So no channel ever carries two messages
in different orders at its two ends, and the program ends even when every send and receive blocks until its other end is there.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from fxchimera.errors import ScheduleError
from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.channel import counterpart, peer
from fxchimera.schedule.order import Order
from fxchimera.schedule.placement import Placement
from fxchimera.schedule.profile import Costs, SyncEdge
from fxchimera.schedule.simulate import completions

__all__ = ["lower"]


def lower(order: Order, costs: Costs | None = None, *, sync: Sequence[SyncEdge] = ()) -> Order:
    """Adds SEND and RECV wherever data changes rank, and the exchange between mirrors and owners.

    Parameters go to the mirrors first; a mirror's gradients leave as soon as its last backward is done (in a forward-only order
    never).

    Args:
        order: A compute-only order.
        costs: Seconds that decide which computation ends first; by default F = 1 and B = 2 everywhere.
        sync: The mirrors and their owners, in any order.

    Raises:
        ScheduleError: The order holds messages already, cannot proceed, or an edge names a replica that the placement does not
            have.
    """
    if order.is_lowered:
        raise ScheduleError(f"order {order.name!r} holds messages already; lower the compute-only order")
    place = order.placement
    lists: list[list[Action]] = [[] for _ in order.ranks]
    edges = _sorted(sync, place)
    for edge in edges:
        _message(lists, edge.owner, Action(edge.stage, Kind.SEND_P, peer=edge.mirror), place)
    left = Counter((rank, action.stage) for rank, action in order if action.kind.is_backward)
    for rank, action in completions(order, costs or Costs.uniform(place.num_stages)):
        lists[rank].append(action)
        if action.kind is Kind.F and action.stage < place.num_stages - 1:
            _message(lists, rank, Action(action.stage, Kind.SEND_F, action.microbatch), place)
        elif action.kind in (Kind.B, Kind.I) and action.stage > 0:
            _message(lists, rank, Action(action.stage, Kind.SEND_B, action.microbatch), place)
        if action.kind.is_backward:
            replica = rank, action.stage
            left[replica] -= 1
            for edge in edges if left[replica] == 0 else ():
                if (edge.mirror, edge.stage) == replica:
                    _message(lists, rank, Action(edge.stage, Kind.SEND_G, peer=edge.owner), place)
    return Order(order.name, place, tuple(map(tuple, lists)))


def _message(lists: list[list[Action]], rank: int, send: Action, place: Placement) -> None:
    """Appends both ends of a message, unless the data stays on its rank."""
    other = peer(send, rank, place)
    if other != rank:
        lists[rank].append(send)
        lists[other].append(counterpart(send, rank))


def _sorted(sync: Sequence[SyncEdge], place: Placement) -> list[SyncEdge]:
    """The edges in one fixed order: stage 0 first, because its forwards are the first to need their parameters."""
    edges = sorted(sync, key=lambda edge: (edge.stage, edge.mirror, edge.owner))
    for edge, following in itertools.pairwise(edges):
        if (edge.stage, edge.mirror, edge.owner) == (following.stage, following.mirror, following.owner):
            raise ScheduleError(f"the sync edge ({edge}) is given twice")
    for edge in edges:
        if not 0 <= edge.owner < place.num_ranks:
            raise ScheduleError(f"the sync edge ({edge}) names a rank that is not there; ranks are 0..{place.num_ranks - 1}")
        held = [stage for _, stage in place.replicas(edge.mirror)]
        if edge.stage not in held:
            raise ScheduleError(
                f"the sync edge ({edge}) names a replica that is not there; rank {edge.mirror} holds the stages {held}"
            )
    return edges
