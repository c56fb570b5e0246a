"""Run an order with blocking messages, on paper.

The strictest mode there is: every rank works through its list, and both ends of a message wait until the other is there.  A
matched SEND and RECV are then one node of the graph whose edges are the ranks' lists; the program ends if and only if that graph
has no cycle, and a program that ends in this mode ends in every weaker one (buffered sends, early receives, a stream or thread a
channel).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxchimera.errors import ScheduleError
from fxchimera.schedule.matching import Place
from fxchimera.schedule.order import Order

__all__ = ["linearize"]


def linearize(order: Order, pairs: Sequence[tuple[Place, Place]]) -> list[Place]:
    """One linear order of all actions in which both ends of a message are neighbours, the SEND first.

    Args:
        order: A lowered order.
        pairs: The places of the SEND and the RECV of every message.

    Raises:
        ScheduleError: The lists wait for each other in a circle; the actions on it are named.
    """
    recv_of = dict(pairs)
    send_of = {recv: send for send, recv in pairs}
    position = [0] * len(order.ranks)
    linear: list[Place] = []
    todo = list(reversed(range(len(order.ranks))))
    while todo:
        rank = todo.pop()
        while position[rank] < len(order.ranks[rank]):
            here = rank, position[rank]
            if here in recv_of:
                send, recv = here, recv_of[here]
            elif here in send_of:
                send, recv = send_of[here], here
            else:
                linear.append(here)
                position[rank] += 1
                continue
            if position[send[0]] != send[1] or position[recv[0]] != recv[1]:
                break
            linear += send, recv
            position[send[0]] += 1
            position[recv[0]] += 1
            todo.append(recv[0] if rank == send[0] else send[0])
    stuck = [rank for rank, at in enumerate(position) if at < len(order.ranks[rank])]
    if stuck:
        raise ScheduleError(_circle(order, position, stuck[0], {**recv_of, **send_of}))
    return linear


def _circle(order: Order, position: Sequence[int], rank: int, other: Mapping[Place, Place]) -> str:
    """Follows who waits for whom until a rank comes again; every stuck rank stands at a message."""
    visited: list[int] = []
    while rank not in visited:
        visited.append(rank)
        rank = other[rank, position[rank]][0]
    lines = []
    for waiting in visited[visited.index(rank) :]:
        target, where = other[waiting, position[waiting]]
        lines.append(
            f"rank {waiting} stands at {order.ranks[waiting][position[waiting]]} until rank {target} reaches "
            f"{order.ranks[target][where]} (position {where}), but rank {target} stands at {order.ranks[target][position[target]]} "
            f"(position {position[target]})"
        )
    return f"order {order.name!r} deadlocks when messages block: " + "; ".join(lines)
