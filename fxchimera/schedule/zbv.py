"""ZBV: zero bubble on a V (Qi et al., 2024): rank r holds stages r and 2D-1-r.

A micro-batch runs through the ranks twice forward (leg 0 down, leg 1 back) and twice backward.  The paper's
greedy rule:

    warm-up   each rank fills up to 2D chunks with forwards, the two legs in turn
    then      every rank in turn one input gradient and one forward, the later leg first
    W         when memory is full, or in a gap that is as long as a W, or in a shorter gap if that makes this rank's idle time no
              longer than the worst rank's

It is tried with and without the last clause for forwards and backwards, and again with the idle times of the first try allowed; the
shortest idle time wins.  Bubble (D-1)F/2 with a barrier, peak activations D, one copy of the weights.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.order import Order
from fxchimera.schedule.placement import v_shape

__all__ = ["zbv"]

_F, _I, _W = 0, 1, 2
_Item = tuple[int, int, int]  # kind, leg, micro-batch
_KINDS = (Kind.F, Kind.I, Kind.W)


def zbv(num_ranks: int, n_microbatches: int, seconds: Sequence[float] = (1.0, 1.0, 1.0), latency: float = 0.0) -> Order:
    """The ZBV order, for any D and N.

    Args:
        num_ranks: Ranks D; the order's placement has 2D stages.
        n_microbatches: Micro-batches N.
        seconds: Of F, I and W, the same on every stage.
        latency: Seconds per message.

    Raises:
        ScheduleError: A number is below 1.
    """
    placement = v_shape(num_ranks, n_microbatches)
    best: _Greedy | None = None
    for fill_backward, fill_forward in itertools.product((True, False), repeat=2):
        if best is not None and max(best.idle) <= 0.0:
            break
        allowed: list[float] | None = None
        while True:
            run = _Greedy(num_ranks, n_microbatches, seconds, latency, allowed, (fill_forward, fill_backward))
            run.go()
            better = allowed is None or max(run.idle) < max(allowed)
            if best is None or max(run.idle) < max(best.idle):
                best = run
            if not better:
                break
            allowed = run.idle
    assert best is not None
    last = 2 * num_ranks - 1
    ranks = (
        tuple(Action(rank if leg == (kind != _F) else last - rank, _KINDS[kind], m) for kind, leg, m in items)
        for rank, items in enumerate(best.out)
    )
    return Order("zbv", placement, tuple(ranks))


class _Greedy:
    """One pass of the rule."""

    def __init__(
        self,
        num_ranks: int,
        number: int,
        seconds: Sequence[float],
        latency: float,
        allowed: list[float] | None,
        fill: tuple[bool, bool],
    ) -> None:
        self.last, self.number, self.seconds, self.latency, self.fill = num_ranks - 1, number, seconds, latency, fill
        self.allowed = allowed or [-1.0] * num_ranks
        self.cap = 2 * num_ranks
        self.count = [[[0, 0] for _ in range(2)] for _ in range(num_ranks)]  # by rank, kind, leg
        self.end: dict[tuple[int, int, int, int], float] = {}
        self.now, self.idle, self.held = [0.0] * num_ranks, [0.0] * num_ranks, [0] * num_ranks
        self.open: list[deque[tuple[int, int]]] = [deque() for _ in range(num_ranks)]
        self.out: list[list[_Item]] = [[] for _ in range(num_ranks)]

    def go(self) -> None:
        self.first_wave()
        self.balance()
        for _ in range(2 * self.number):
            legs = [self.backward_leg(rank) for rank in range(self.last + 1)]
            for rank in reversed(range(self.last + 1)):
                if legs[rank] == 1:
                    self.run(rank, _I, 1)
            for rank in range(self.last + 1):
                if legs[rank] == 0:
                    self.run(rank, _I, 0)
            for rank in range(self.last + 1):
                leg = self.forward_leg(rank)
                if leg is not None:
                    while self.held[rank] >= self.cap:
                        self.weight(rank)
                    self.run(rank, _F, leg)
        for rank in range(self.last + 1):
            while self.open[rank]:
                self.weight(rank)

    def first_wave(self) -> None:
        """Micro-batch 0 down and back; a rank that waits for it takes more first forwards meanwhile."""
        for rank in range(self.last + 1):
            self.put(rank, _F, 0)
        for rank in reversed(range(self.last + 1)):
            if rank < self.last:
                arrival = self.end[_F, 1, rank + 1, 0] + self.latency
                while (
                    self.held[rank] + 2 * (rank + 1) <= self.cap
                    and self.now[rank] + self.seconds[_F] <= arrival
                    and self.count[rank][_F][0] < self.number
                ):
                    for above in range(rank + 1):
                        self.put(above, _F, 0)
            self.put(rank, _F, 1)

    def balance(self) -> None:
        """Fills each rank up to the number of forwards of the one before."""
        leg = 0
        for rank in range(1, self.last + 1):
            mine, before = self.count[rank][_F], self.count[rank - 1][_F]
            while sum(mine) < sum(before) or mine[1] <= before[1] < self.number:
                for below in reversed(range(rank, self.last + 1)):
                    if self.count[below][_F][leg] < self.number:
                        self.put(below, _F, leg)
                leg = 1 - leg

    def backward_leg(self, rank: int) -> int:
        """Leg 1 (the way back) where its data is there or the other leg has ended, else leg 0."""
        down, back = self.count[rank][_I]
        if back >= down:
            return 0
        if rank == self.last or down >= self.number:
            return 1
        return int((_I, 1, rank + 1, back) in self.end)

    def forward_leg(self, rank: int) -> int | None:
        down, back = self.count[rank][_F]
        if back >= self.number:
            return None
        if back < down and (rank == self.last or (_F, 1, rank + 1, back) in self.end):
            return 1
        if back >= down or (down < self.number and (rank == 0 or (_F, 0, rank - 1, down) in self.end)):
            return 0
        return None

    def run(self, rank: int, kind: int, leg: int) -> None:
        """Puts a forward or input gradient, after the weight gradients that fit before its data is there."""
        ready = self.arrival(rank, kind, leg, self.count[rank][kind][leg])
        while self.open[rank] and ready >= self.now[rank] + self.seconds[_W]:
            self.weight(rank)
        worst = max(max(self.idle), max(self.allowed) - self.allowed[rank])
        late = ready - self.now[rank] > worst - self.idle[rank]
        if self.open[rank] and late and (self.fill[kind] or (kind == _I and leg == 1)):
            self.weight(rank)
        self.put(rank, kind, leg)

    def weight(self, rank: int) -> None:
        leg, microbatch = self.open[rank].popleft()
        self.now[rank] += self.seconds[_W]
        self.held[rank] -= 1
        self.out[rank].append((_W, leg, microbatch))

    def put(self, rank: int, kind: int, leg: int) -> None:
        microbatch = self.count[rank][kind][leg]
        self.count[rank][kind][leg] += 1
        begin = max(self.now[rank], self.arrival(rank, kind, leg, microbatch))
        if self.out[rank]:
            self.idle[rank] += begin - self.now[rank]
        self.now[rank] = self.end[kind, leg, rank, microbatch] = begin + self.seconds[kind]
        self.out[rank].append((kind, leg, microbatch))
        if kind == _F:
            self.held[rank] += 1
        else:
            self.open[rank].append((leg, microbatch))

    def arrival(self, rank: int, kind: int, leg: int, microbatch: int) -> float:
        """When the data of a forward or input gradient is on the rank."""
        source = rank - 1 if leg == 0 else rank + 1
        if 0 <= source <= self.last:
            return self.end[kind, leg, source, microbatch] + self.latency
        return 0.0
