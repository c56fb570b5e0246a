"""What actions cost: seconds of every stage and bytes of every message.

The simulator and the planner read a :class:`Costs`; where it comes from (measured, estimated, uniform) is not their business.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from fxchimera.errors import ScheduleError
from fxchimera.schedule.action import Action, Kind

__all__ = ["Costs", "SyncEdge"]


@dataclass(frozen=True, slots=True)
class SyncEdge:
    """A mirror replica and one rank that owns parameters of it.

    Each step brings the parameters from the owner to the mirror and the gradients back.  With parameters tied across stages a
    mirror replica has several owners, one edge each.

    Args:
        stage: The stage of the mirror replica.
        mirror: The rank of the mirror replica.
        owner: The rank of the owner, never the mirror's.
        bytes: Size of the parameters that go along the edge, in bytes.
    """

    stage: int
    mirror: int
    owner: int
    bytes: int = 0

    def __post_init__(self) -> None:
        if self.mirror == self.owner:
            raise ScheduleError(
                f"a rank does not exchange with itself: stage {self.stage}, mirror and owner are both rank {self.owner}"
            )

    def __str__(self) -> str:
        return f"stage {self.stage}, mirror rank {self.mirror}, owner rank {self.owner}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds and bytes of the actions.

    A message takes ``latency + bytes / bandwidth`` seconds and occupies no rank.

    Args:
        forward: Seconds of one micro-batch's forward, by stage.
        input_grad: Seconds of the input-gradient half of the backward, by stage.
        weight_grad: Seconds of the weight-gradient half, by stage.
        latency: Seconds per message.
        bytes_per_second: Bandwidth between neighbouring stages.
        boundary_bytes: Bytes that stage s sends to s+1 per micro-batch (the gradient back is as large); empty means none.
        sync_bytes_per_second: Bandwidth of the exchange between replicas.
        sync: The edges whose bytes the exchange is charged; an edge not listed costs the latency.
        backward: Seconds of the full backward, by stage; empty: splitting costs nothing, it takes the sum.

    Raises:
        ScheduleError: The tuples do not cover the same stages, or a number is negative.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    latency: float = 0.0
    bytes_per_second: float = math.inf
    boundary_bytes: tuple[int, ...] = ()
    sync_bytes_per_second: float = math.inf
    sync: tuple[SyncEdge, ...] = ()
    backward: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        lengths = len(self.forward), len(self.input_grad), len(self.weight_grad)
        if len(set(lengths)) != 1:
            raise ScheduleError(f"forward, input_grad and weight_grad cover {lengths} stages; they must cover the same")
        if self.boundary_bytes and len(self.boundary_bytes) < len(self.forward) - 1:
            raise ScheduleError(f"boundary_bytes has {len(self.boundary_bytes)} entries for {len(self.forward) - 1} boundaries")
        if self.backward and len(self.backward) != len(self.forward):
            raise ScheduleError(f"backward covers {len(self.backward)} stages and forward {len(self.forward)}")
        for name in ("forward", "input_grad", "weight_grad", "backward", "boundary_bytes"):
            for stage, number in enumerate(getattr(self, name)):
                if not 0 <= number < math.inf:
                    raise ScheduleError(f"seconds and bytes must be finite and not negative, got {name}[{stage}]={number}")
        if not 0 <= self.latency < math.inf:
            raise ScheduleError(f"latency must be finite and not negative, got {self.latency} s")
        if not (self.bytes_per_second > 0 and self.sync_bytes_per_second > 0):
            raise ScheduleError(
                f"bandwidths must be above 0 bytes per second, got bytes_per_second={self.bytes_per_second} and "
                f"sync_bytes_per_second={self.sync_bytes_per_second}"
            )

    @classmethod
    def uniform(cls, num_stages: int, forward: float = 1.0, backward: float = 2.0, latency: float = 0.0) -> Costs:
        """The same seconds on every stage, the backward split in two equal halves."""
        half = (backward / 2,) * num_stages
        return cls(forward=(forward,) * num_stages, input_grad=half, weight_grad=half, latency=latency)

    def with_split_price(self, price: float) -> Costs:
        """These costs where the two halves together take ``1 + price`` times the full backward, which stays as it is.

        Raises:
            ScheduleError: The price is below 0.
        """
        if not 0 <= price < math.inf:
            raise ScheduleError(f"the price of splitting a backward is a share of at least 0, got {price}")
        whole = tuple(self.full_backward(stage) for stage in range(len(self.forward)))
        first, second = (tuple((1 + price) * half for half in halves) for halves in (self.input_grad, self.weight_grad))
        return dataclasses.replace(self, input_grad=first, weight_grad=second, backward=whole)

    def refined(self, chunks: int) -> Costs:
        """The costs of the same model with every stage cut into ``chunks`` equal ones.

        A new boundary carries what the next old one does.
        """
        if chunks == 1:
            return self
        count = len(self.forward)
        forward, first, second, whole = (
            tuple(seconds / chunks for seconds in stages for _ in range(chunks))
            for stages in (self.forward, self.input_grad, self.weight_grad, self.backward)
        )
        carried = self.boundary_bytes and tuple(
            self.boundary_bytes[min(cut // chunks, count - 2)] for cut in range(chunks * count - 1) if count > 1
        )
        return dataclasses.replace(
            self, forward=forward, input_grad=first, weight_grad=second, backward=whole, boundary_bytes=carried, sync=()
        )

    def full_backward(self, stage: int) -> float:
        """Seconds of a backward in one piece."""
        return self.backward[stage] if self.backward else self.input_grad[stage] + self.weight_grad[stage]

    def boundary_seconds(self, stage: int) -> float:
        """Seconds of a message over the boundary between a stage and the next, either way."""
        if not self.boundary_bytes:
            return self.latency
        return self.latency + self.boundary_bytes[stage] / self.bytes_per_second

    def seconds(self, action: Action) -> float:
        """Seconds of a computation.

        Raises:
            ScheduleError: The action is a message.
        """
        stage = action.stage
        if action.kind is Kind.F:
            return self.forward[stage]
        if action.kind is Kind.B:
            return self.full_backward(stage)
        if action.kind is Kind.I:
            return self.input_grad[stage]
        if action.kind is Kind.W:
            return self.weight_grad[stage]
        raise ScheduleError(f"{action} is a message, not a computation; ask message_seconds")

    def message_seconds(self, action: Action, rank: int | None = None) -> float:
        """Seconds from the start of a send until the data is there; the same for both ends of a message.

        Args:
            action: A SEND or a RECV.
            rank: The rank of the action; needed for P and G only where parameters tied across stages give a mirror several owners.

        Raises:
            ScheduleError: The action is a computation.
        """
        kind = action.kind
        if kind.is_compute:
            raise ScheduleError(f"{action} is a computation, not a message; ask seconds")
        if kind.is_sync:
            return self.latency + self._sync_bytes(action, rank) / self.sync_bytes_per_second
        return self.boundary_seconds(action.stage if kind in (Kind.SEND_F, Kind.RECV_B) else action.stage - 1)

    def wire_seconds(self, action: Action, rank: int | None = None) -> float:
        """The part of :meth:`message_seconds` in which a message's bytes are on the wire: all but the latency."""
        return self.message_seconds(action, rank) - self.latency

    def _sync_bytes(self, action: Action, rank: int | None) -> int:
        at_mirror = action.kind in (Kind.SEND_G, Kind.RECV_P)
        found = 0
        for edge in self.sync:
            here, there = (edge.mirror, edge.owner) if at_mirror else (edge.owner, edge.mirror)
            if edge.stage == action.stage and there == action.peer and rank in (None, here):
                found = max(found, edge.bytes)
        return found
