"""Which channel a message takes.

A channel is (source rank, destination rank, flow): the flows are ``down-F``, ``down-B``, ``up-F``, ``up-B`` for what crosses stage
boundaries, ``P`` for parameters and ``G`` for gradients.  Two flows never share one, because a rank that waits for the head of
one flow would hold up the other: between two neighbours the down pipe's forwards and the up pipe's backwards go the same way.
"""

from __future__ import annotations

from fxchimera.errors import ScheduleError
from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.placement import Placement

__all__ = ["channel", "counterpart", "peer"]

_OTHER_STAGE = {Kind.SEND_F: 1, Kind.RECV_F: -1, Kind.SEND_B: -1, Kind.RECV_B: 1}
_OTHER_KIND = {
    Kind.SEND_F: Kind.RECV_F,
    Kind.RECV_F: Kind.SEND_F,
    Kind.SEND_B: Kind.RECV_B,
    Kind.RECV_B: Kind.SEND_B,
    Kind.SEND_P: Kind.RECV_P,
    Kind.RECV_P: Kind.SEND_P,
    Kind.SEND_G: Kind.RECV_G,
    Kind.RECV_G: Kind.SEND_G,
}


def counterpart(action: Action, rank: int) -> Action:
    """The other end of a message: ``1RECV_F0`` for ``0SEND_F0``, ``3RECV_G<3`` on rank 0 for ``3SEND_G>0`` on rank 3.

    Raises:
        ScheduleError: The action is a computation, or it crosses no boundary (the send of a forward by ``2RECV_F0`` is
            ``1SEND_F0``; nothing is before stage 0).
    """
    kind = action.kind
    if kind.is_compute:
        raise ScheduleError(f"{action} on rank {rank} is a computation and has no peer")
    if kind.is_sync:
        return Action(action.stage, _OTHER_KIND[kind], peer=rank)
    other = action.stage + _OTHER_STAGE[kind]
    if other < 0:
        raise ScheduleError(f"{action} on rank {rank}: nothing comes before stage 0")
    return Action(other, _OTHER_KIND[kind], action.microbatch)


def peer(action: Action, rank: int, placement: Placement) -> int:
    """The rank at the other end of a message.

    Raises:
        ScheduleError: The action is a computation, or the stage or micro-batch at the other end does not exist.
    """
    if action.peer is not None:
        if action.peer >= placement.num_ranks:
            raise ScheduleError(f"{action} on rank {rank}: there are {placement.num_ranks} ranks only")
        return action.peer
    other = action.stage + _OTHER_STAGE.get(action.kind, placement.num_stages)
    if action.microbatch is None or not (0 <= other < placement.num_stages and action.microbatch < placement.n_microbatches):
        raise ScheduleError(
            f"{action} on rank {rank} has no other end: there are stages 0..{placement.num_stages - 1} "
            f"and micro-batches 0..{placement.n_microbatches - 1}"
        )
    return placement.rank(other, action.microbatch)


def channel(action: Action, rank: int, placement: Placement) -> tuple[int, int, str]:
    """The channel (source rank, destination rank, flow) of a message; the same for its two ends.

    Raises:
        ScheduleError: As :func:`peer`.
    """
    other = peer(action, rank, placement)
    flow = action.kind.content
    if action.microbatch is not None:
        flow = f"{placement.pipe_name(placement.pipe_of[action.microbatch])}-{flow}"
    return (rank, other, flow) if action.kind.is_send else (other, rank, flow)
