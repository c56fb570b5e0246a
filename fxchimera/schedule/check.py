"""Prove a lowered order before its first step: it computes the right thing, ends, and fits its buffers.

    complete    every computation once, on its rank             facts.py
    match       both ends of a channel list the same messages   matching.py
    depends     every action comes after its data               facts.py
    linearize   no circle of waiting, blocking messages         rendezvous.py
    peaks       activations and messages held at once           buffers.py

A proof with blocking messages covers every weaker mode: buffered sends, receives posted early, a stream or a thread a channel.
torch's own check of such lists lets swapped receives, facing sends and unreceived sends pass (torch 2.13,
``_simulate_comms_compute``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxchimera.errors import ScheduleError
from fxchimera.schedule.action import Kind
from fxchimera.schedule.buffers import outstanding, peak_activations
from fxchimera.schedule.channel import channel, peer
from fxchimera.schedule.facts import complete, depends
from fxchimera.schedule.matching import match
from fxchimera.schedule.order import Order
from fxchimera.schedule.profile import SyncEdge
from fxchimera.schedule.rendezvous import linearize

__all__ = ["Proof", "channel", "check", "peer"]


@dataclass(frozen=True, slots=True)
class Proof:
    """What was proven of an order.

    Args:
        digest: The order's digest.
        peak_activations: By rank, the most micro-batches held at once over its replicas.
        messages: Messages of one step.
        channels: Channels in use as (source rank, destination rank, flow), sorted.
        early: By channel, in the order of ``channels``, the most messages on the way or received but not used, when receives are
            posted as early as one likes; the size of a receive pool that is never short.
    """

    digest: str
    peak_activations: tuple[int, ...]
    messages: int
    channels: tuple[tuple[int, int, str], ...]
    early: tuple[int, ...]


def check(order: Order, *, slots: Sequence[int] | None = None, sync: Sequence[SyncEdge] | None = None) -> Proof:
    """Proves a lowered order (with one rank also a compute-only one).

    Args:
        order: The order, with its messages.
        slots: By rank, the most activations it may hold; not compared when None.
        sync: The mirrors and owners that the order must serve: parameters for every edge and, unless it is forward-only, gradients.
            When None the exchange that the order holds is proven, but not that it is all there.

    Raises:
        ScheduleError: The order is wrong; the actions and ranks are named.
    """
    complete(order)
    if sync is not None:
        _serves(order, sync)
    matched = match(order)
    depends(order)
    linear = linearize(order, [pair for pairs in matched.values() for pair in pairs])
    return Proof(
        digest=order.digest(),
        peak_activations=peak_activations(order, slots),
        messages=sum(map(len, matched.values())),
        channels=tuple(matched),
        early=outstanding(order, linear, matched),
    )


def _serves(order: Order, sync: Sequence[SyncEdge]) -> None:
    """Compares the exchange in the order with the edges it must serve."""
    wanted = {(edge.stage, edge.mirror, edge.owner) for edge in sync}
    kinds = [(Kind.RECV_P, "refreshes the parameters")]
    if not order.is_forward_only:
        kinds.append((Kind.SEND_G, "sends the gradients"))
    for kind, what in kinds:
        found = {(action.stage, rank, action.peer) for rank, action in order if action.kind is kind}
        for stage, mirror, owner in sorted(wanted - found):
            raise ScheduleError(
                f"no action {what} of stage {stage}'s mirror on rank {mirror} with its owner, rank {owner}: "
                f"{stage}{kind.value} is missing on rank {mirror}"
            )
        if found - wanted:
            raise ScheduleError(f"rank {min(found - wanted)[1]} {what} of a mirror that has no such owner: {min(found - wanted)}")
