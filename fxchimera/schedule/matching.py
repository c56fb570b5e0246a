"""Pair every SEND with its RECV, channel by channel.

On a channel the k-th send meets the k-th receive, whatever the timing and whatever they were meant to carry.  So the two ends
must list the same messages in the same order; then, and only then, every message reaches the action it is meant for.
"""

from __future__ import annotations

from fxchimera.errors import ScheduleError
from fxchimera.schedule.action import Action
from fxchimera.schedule.channel import channel, counterpart
from fxchimera.schedule.order import Order

__all__ = ["Channel", "Place", "match"]

Channel = tuple[int, int, str]
Place = tuple[int, int]  # rank, position in its list


def match(order: Order) -> dict[Channel, list[tuple[Place, Place]]]:
    """The (place of the SEND, place of the RECV) of every message, by channel, in the channel's order; channels sorted.

    Raises:
        ScheduleError: The two ends of a channel differ, or a message stays on its rank; the two actions are named.
    """
    sends: dict[Channel, list[Place]] = {}
    recvs: dict[Channel, list[Place]] = {}
    for rank, actions in enumerate(order.ranks):
        for position, action in enumerate(actions):
            if not action.kind.is_compute:
                side = sends if action.kind.is_send else recvs
                side.setdefault(channel(action, rank, order.placement), []).append((rank, position))
    matched = {}
    for key in sorted({*sends, *recvs}):
        ends = sends.get(key, []), recvs.get(key, [])
        _agree(order, key, *ends)
        matched[key] = list(zip(*ends, strict=True))
    return matched


def _agree(order: Order, key: Channel, sends: list[Place], recvs: list[Place]) -> None:
    source, target, flow = key
    if source == target:
        found = _at(order, (sends + recvs)[0])
        raise ScheduleError(
            f"rank {source}: {found} and its other end {counterpart(found, source)} are on one rank; no message is needed"
        )
    where = f"channel {flow} from rank {source} to rank {target}"
    for index in range(max(len(sends), len(recvs))):
        send = _at(order, sends[index]) if index < len(sends) else None
        recv = _at(order, recvs[index]) if index < len(recvs) else None
        if send is None:
            assert recv is not None
            raise ScheduleError(
                f"{where}: rank {target} receives {recv}, and rank {source} never sends it: {counterpart(recv, target)} is missing"
            )
        wanted = counterpart(send, source)
        if recv is None:
            raise ScheduleError(f"{where}: rank {source} sends {send}, and rank {target} never receives it: {wanted} is missing")
        if recv != wanted:
            raise ScheduleError(
                f"{where}: message {index} is {send} on rank {source} (position {sends[index][1]}) but {recv} on rank {target} "
                f"(position {recvs[index][1]}), which would take the wrong data; {wanted} belongs there"
            )


def _at(order: Order, place: Place) -> Action:
    return order.ranks[place[0]][place[1]]
