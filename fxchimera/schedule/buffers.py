"""How much an order holds at once: activations of every rank, and messages on every channel.

Activations depend on the rank's list only.  How far a sender can run ahead of a receiver that posts every receive early depends
on what must have happened before what, whatever the timing: that is what the vector clocks count.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence

from fxchimera.errors import ScheduleError
from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.matching import Channel, Place
from fxchimera.schedule.order import Order

__all__ = ["outstanding", "peak_activations"]


def peak_activations(order: Order, slots: Sequence[int] | None = None) -> tuple[int, ...]:
    """The most micro-batches that each rank holds at once, over all its replicas: forwards done minus backwards done.

    A split backward holds the activation until its W.  Without backwards nothing is held for one, so a rank holds 1.

    Args:
        order: An order, lowered or not.
        slots: The most that each rank may hold.

    Raises:
        ScheduleError: A rank holds more than its slots; the forward that is one too many and the next backward are named.
    """
    if slots is not None and len(slots) != len(order.ranks):
        raise ScheduleError(f"slots has {len(slots)} entries for {len(order.ranks)} ranks")
    keep = not order.is_forward_only
    peaks = []
    for rank, actions in enumerate(order.ranks):
        held = peak = 0
        for position, action in enumerate(actions):
            if action.kind is Kind.F:
                peak = max(peak, held + 1)
                if slots is not None and held + 1 > slots[rank]:
                    freed = next((str(later) for later in actions[position:] if later.kind in (Kind.B, Kind.W)), "no backward")
                    raise ScheduleError(
                        f"rank {rank} has {slots[rank]} activation slots, and {action} (position {position}) would be activation "
                        f"{held + 1}: the next to free a slot is {freed}"
                    )
                held += keep
            elif action.kind in (Kind.B, Kind.W):
                held -= 1
        peaks.append(peak)
    return tuple(peaks)


def outstanding(order: Order, linear: Sequence[Place], matched: Mapping[Channel, Sequence[tuple[Place, Place]]]) -> tuple[int, ...]:
    """The most messages of each channel that can be on the way or received but not used, whatever the timing.

    Receives may be posted as early as the receiver likes.  A message counts from its SEND to the end of the computation that uses
    it; parameters are used by the mirror's first computation, gradients only after the last action.

    Args:
        order: A lowered order.
        linear: All actions in an order that respects every list and every message.
        matched: The places of SEND and RECV of every message by channel, in the channel's order.
    """
    channel_of = {send: key for key, pairs in matched.items() for send, _ in pairs}
    recv_of = {send: recv for pairs in matched.values() for send, recv in pairs}
    uses = [_uses(actions) for actions in order.ranks]
    clocks = [[0] * len(order.ranks) for _ in order.ranks]  # clocks[r][q]: computations of q that are over before r's next action
    carried: dict[tuple[int, float], list[list[int]]] = {}  # clocks that come with the data of a rank's n-th computation
    used_at: dict[Channel, list[float]] = {key: [] for key in matched}
    most = dict.fromkeys(matched, 0)
    for rank, position in linear:
        action = order.ranks[rank][position]
        clock = clocks[rank]
        if action.kind.is_compute:
            clock[rank] += 1
            for other in carried.pop((rank, clock[rank]), ()):
                clock[:] = map(max, clock, other)
        elif action.kind.is_send:
            key = channel_of[rank, position]
            target, where = recv_of[rank, position]
            use = uses[target].get(order.ranks[target][where], math.inf)
            carried.setdefault((target, use), []).append(clock.copy())
            bisect.insort(used_at[key], use)
            most[key] = max(most[key], len(used_at[key]) - bisect.bisect_right(used_at[key], clock[target]))
    return tuple(most.values())


def _uses(actions: Sequence[Action]) -> dict[Action, float]:
    """For every RECV of a rank, the number (from 1) of the computation that uses its data."""
    number: dict[tuple[int, str, int | None], float] = {}
    first: dict[int, float] = {}
    count = 0
    for action in actions:
        if action.kind.is_compute:
            count += 1
            number[action.stage, "B" if action.kind is Kind.I else action.kind.value, action.microbatch] = count
            first.setdefault(action.stage, count)
    uses: dict[Action, float] = {}
    for action in actions:
        if action.kind is Kind.RECV_P:
            uses[action] = first.get(action.stage, math.inf)
        elif action.kind.is_recv and action.kind is not Kind.RECV_G:
            uses[action] = number.get((action.stage, action.kind.content, action.microbatch), math.inf)
    return uses
