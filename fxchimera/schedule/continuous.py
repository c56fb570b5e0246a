"""Chimera without units: two 1F1B pipes that go on through all micro-batches, each rank taking the ready action of least slot.

The slots are Chimera's, with the micro-batch's number j in its pipe running over the whole step:

    F on stage s: s + 2j          B on stage s: 2D-1-s + 2j

A forward of stage s starts only while fewer than min(cap, D-s) micro-batches of its pipe are between forward and backward there.
With cap = D/2 this is direct concatenation; with 3D/4 the waits between the units are gone: at B = 2F and free communication the
excess over N(F+B) is 3F at D = 4, 11F at D = 8, 28F at D = 16, for every N >= 2D, where direct concatenation grows with N.
"""

from __future__ import annotations

import heapq

from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.order import Order
from fxchimera.schedule.placement import bidirectional
from fxchimera.schedule.profile import Costs

__all__ = ["continuous"]


def continuous(num_stages: int, n_microbatches: int, costs: Costs | None = None, cap: int | None = None) -> Order:
    """The continuous order, for any D and N.

    Args:
        num_stages: Stages D.
        n_microbatches: Micro-batches N, both pipes together.
        costs: Seconds that decide what is ready first; F = 1 and B = 2 when None.
        cap: Micro-batches of a pipe that a stage may hold; ceil(3D/4) when None.

    Raises:
        ScheduleError: A number is below 1.
    """
    run = _Run(num_stages, n_microbatches, costs or Costs.uniform(num_stages), cap or -(-3 * num_stages // 4))
    return run.go()


class _Run:
    """State of one pass over time."""

    def __init__(self, num_stages: int, n_microbatches: int, costs: Costs, cap: int) -> None:
        self.place = bidirectional(num_stages, n_microbatches)
        self.depth, self.costs = num_stages, costs
        self.room = [max(1, min(cap, num_stages - stage)) for stage in range(num_stages)]
        self.live = [[0] * num_stages for _ in self.place.pipes]
        self.ready: list[list[tuple[int, int, int, bool]]] = [[] for _ in range(self.place.num_ranks)]
        self.busy = [False] * self.place.num_ranks
        self.out: list[list[Action]] = [[] for _ in range(self.place.num_ranks)]
        self.index = [0] * n_microbatches
        self.events: list[tuple[float, int, int, int, bool]] = []  # seconds, 0 ends / 1 arrives, stage, micro-batch, backward
        for pipe in range(len(self.place.pipes)):
            for index, microbatch in enumerate(self.place.microbatches(pipe)):
                self.index[microbatch] = index
                self.arrive(0, microbatch, backward=False)

    def go(self) -> Order:
        touched = set(range(len(self.out)))
        now = 0.0
        while True:
            for rank in sorted(touched):
                if not self.busy[rank]:
                    self.choose(rank, now)
            if not self.events:
                return Order("continuous", self.place, tuple(map(tuple, self.out)))
            now, touched = self.events[0][0], set()
            while self.events and self.events[0][0] <= now + 1e-9:
                _, arrives, stage, microbatch, backward = heapq.heappop(self.events)
                rank = self.place.rank(stage, microbatch)
                touched.add(rank)
                if arrives:
                    self.arrive(stage, microbatch, backward=backward)
                else:
                    self.busy[rank] = False
                    self.live[self.place.pipe_of[microbatch]][stage] -= backward

    def arrive(self, stage: int, microbatch: int, *, backward: bool) -> None:
        slot = (2 * self.depth - 1 - stage if backward else stage) + 2 * self.index[microbatch]
        self.ready[self.place.rank(stage, microbatch)].append((slot, stage, microbatch, backward))

    def choose(self, rank: int, now: float) -> None:
        """Starts the ready action of least slot for which there is room."""
        for item in sorted(self.ready[rank]):
            _, stage, microbatch, backward = item
            live = self.live[self.place.pipe_of[microbatch]]
            if backward or live[stage] < self.room[stage]:
                self.ready[rank].remove(item)
                live[stage] += not backward
                self.start(rank, Action(stage, Kind.B if backward else Kind.F, microbatch), now)
                return

    def start(self, rank: int, action: Action, now: float) -> None:
        self.busy[rank] = True
        self.out[rank].append(action)
        stage, backward = action.stage, action.kind is Kind.B
        assert action.microbatch is not None
        end = now + self.costs.seconds(action)
        heapq.heappush(self.events, (end, 0, stage, action.microbatch, backward))
        target, turns = stage + (-1 if backward else 1), not backward and stage == self.depth - 1
        if turns:
            heapq.heappush(self.events, (end, 1, stage, action.microbatch, True))
        elif target >= 0:
            hop = self.costs.boundary_seconds(min(stage, target)) if self.place.rank(target, action.microbatch) != rank else 0.0
            heapq.heappush(self.events, (end + hop, 1, target, action.microbatch, backward))
