"""When every action ran: one type for predicted and for measured runs.

So one exporter draws both, and a test compares a prediction with a run event by event.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxchimera.schedule.action import Action
from fxchimera.schedule.placement import Placement

__all__ = ["Event", "Timeline"]


@dataclass(frozen=True, slots=True)
class Event:
    """One action from start to end, in seconds.

    A message's event is its time on the way, at both ends; it occupies no rank.
    """

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """All events of one step.

    Args:
        name: What ran, for people.
        placement: Where the stages are.
        events: Computations and messages, in any order.
    """

    name: str
    placement: Placement
    events: tuple[Event, ...]

    @property
    def compute(self) -> tuple[Event, ...]:
        """The computations only."""
        return tuple(event for event in self.events if event.action.kind.is_compute)

    @property
    def start(self) -> float:
        """Seconds at which the first event starts; 0 in a prediction."""
        return min((event.start for event in self.events), default=0.0)

    @property
    def makespan(self) -> float:
        """Seconds of the step with a barrier at start and end, the exchange between replicas included."""
        return max((event.end for event in self.events), default=0.0) - self.start

    def busy(self, rank: int) -> float:
        """Seconds in which a rank computes."""
        return sum(event.end - event.start for event in self.compute if event.rank == rank)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they do not compute, with a barrier: 1 - compute / (ranks * makespan)."""
        whole = self.placement.num_ranks * self.makespan
        return 1.0 - sum(event.end - event.start for event in self.compute) / whole if whole else 0.0

    @property
    def span_bubble(self) -> float:
        """Share of idle time between a rank's own first and last computation, of the rank where it is largest.

        What would be left without a barrier, when steps overlap; the zero-bubble papers quote this one.
        """
        shares = [0.0]
        for rank in range(self.placement.num_ranks):
            events = [event for event in self.compute if event.rank == rank]
            if events:
                span = max(event.end for event in events) - min(event.start for event in events)
                shares.append(1.0 - self.busy(rank) / span if span else 0.0)
        return max(shares)
