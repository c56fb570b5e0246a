"""One thing that one rank does: a forward, a backward, or one end of a message.

The text is that of torch.distributed.pipelining: ``2F0`` is the forward of micro-batch 0 on stage 2, ``3SEND_B1`` sends the input
gradient of micro-batch 1 away from stage 3.  The exchange between the replicas of a stage has no micro-batch and names the peer
rank instead, with the arrow pointing the way the data goes: ``3SEND_G>0`` sends the gradients of stage 3 to rank 0, ``3RECV_P<1``
receives the parameters of stage 3 from rank 1.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from fxchimera.errors import ScheduleError

__all__ = ["Action", "Kind"]


class Kind(enum.Enum):
    """What an action does; the value is torch's text.

    ``B`` is the full backward, ``I`` and ``W`` its two halves (input gradient, weight gradient).  ``P`` refreshes a mirror's
    parameters from their owner, ``G`` brings a mirror's gradients to the owner.

    Attributes:
        is_compute: ``F``, ``B``, ``I`` or ``W``.
        is_send: The action hands a message over.
        is_recv: The action takes a message.
        is_backward: ``B``, ``I`` or ``W``.
        is_sync: Exchange between replicas (``P`` or ``G``): carries a peer, no micro-batch.
        content: What a message carries, ``F``, ``B``, ``P`` or ``G``; for a computation its own letter.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the literature's and torch's name for the input gradient
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    SEND_P = "SEND_P"
    RECV_P = "RECV_P"
    SEND_G = "SEND_G"
    RECV_G = "RECV_G"

    def __init__(self, text: str) -> None:
        # Plain attributes, set once: a property would go through enum's descriptors, and the checker asks some 10,000 times.
        self.is_compute: bool = len(text) == 1
        self.is_send: bool = text.startswith("SEND")
        self.is_recv: bool = text.startswith("RECV")
        self.is_backward: bool = text in ("B", "I", "W")
        self.content: str = text[-1]
        self.is_sync: bool = not self.is_compute and self.content in "PG"

    __hash__ = object.__hash__  # a member is one object; enum's own is Python code, and a search asks some 10,000,000 times


_TEXT = re.compile(r"([0-9]+)(SEND_[FB]|RECV_[FB]|[FBIW])([0-9]+)|([0-9]+)(SEND_[PG](?=>)|RECV_[PG](?=<))[<>]([0-9]+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one rank.

    Args:
        stage: The stage it belongs to; a RECV names the receiving stage, a P or G the mirror replica's stage.
        kind: What is done.
        microbatch: The micro-batch, for every kind but P and G.
        peer: The other rank, for P and G only; the other messages find theirs in the placement.

    Raises:
        ScheduleError: A number is negative, or micro-batch and peer do not fit the kind.
    """

    stage: int
    kind: Kind
    microbatch: int | None = None
    peer: int | None = None

    def __post_init__(self) -> None:
        given, absent = (self.peer, self.microbatch) if self.kind.is_sync else (self.microbatch, self.peer)
        if given is None or absent is not None or given < 0 or self.stage < 0:
            wanted = "a peer rank and no micro-batch" if self.kind.is_sync else "a micro-batch and no peer rank"
            raise ScheduleError(
                f"an action of kind {self.kind.value} takes a stage >= 0, {wanted}; "
                f"got stage={self.stage}, microbatch={self.microbatch}, peer={self.peer}"
            )

    def __str__(self) -> str:
        if self.peer is not None:
            return f"{self.stage}{self.kind.value}{'>' if self.kind.is_send else '<'}{self.peer}"
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads the text that :func:`str` writes; blanks around it are ignored.

        Raises:
            ScheduleError: The text is no action.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action; write stage, kind, micro-batch as in '2F0', '0B12' or '3SEND_B1', "
                "and stage, kind, peer rank as in '3SEND_G>0' or '3RECV_P<1'"
            )
        stage, kind, microbatch, sync_stage, sync_kind, peer = match.groups()
        if kind is not None:
            return cls(int(stage), Kind(kind), int(microbatch))
        return cls(int(sync_stage), Kind(sync_kind), peer=int(peer))
