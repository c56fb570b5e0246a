"""A pipeline step as a scheduling problem over integers, for the rules and the search.

Every (micro-batch m, stage s) is a cell, number m*S + s, and has up to three operations, number 3*cell + kind:

    kind 0  F   the forward
    kind 1  X   the backward: full (B) where the cell is fused, the input gradient (I) where it is split
    kind 2  W   the weight gradient, only where the cell is split

A plan is one list of such numbers a rank, and the set of fused cells.  Numbers instead of actions because a rule looks at some
thousand of them in a few milliseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from fxchimera.errors import ScheduleError
from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.order import Order
from fxchimera.schedule.placement import Placement
from fxchimera.schedule.profile import Costs

__all__ = ["Plan", "Problem"]

F, X, W = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Plan:
    """An order in numbers.

    Args:
        ranks: The operations of every rank, in order.
        fused: By cell, whether the backward is one operation.
    """

    ranks: list[list[int]]
    fused: list[bool]


@dataclass(frozen=True, slots=True)
class Problem:
    """Placement, costs and limits in the form in which rules and search want them.

    Args:
        placement: Where the stages are.
        costs: Seconds of every stage.
        caps: By rank, the most that it may hold, in the unit of ``holds``.
        holds: By stage, what a micro-batch holds from the start of its F to the end of its B or W (1 each, or bytes).
        split: Whether backwards may be split in I and W.
        away: Stages whose message to the next one takes its time although both are on one rank (fold.py).
    """

    placement: Placement
    costs: Costs
    caps: tuple[float, ...]
    holds: tuple[float, ...]
    split: bool = True
    away: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        place = self.placement
        if len(self.costs.forward) != place.num_stages or len(self.holds) != place.num_stages:
            raise ScheduleError(
                f"costs for {len(self.costs.forward)} stages and holds for {len(self.holds)}, the placement has {place.num_stages}"
            )
        for rank, need in enumerate(self.least()):
            if need > self.caps[rank]:
                raise ScheduleError(
                    f"rank {rank} may hold {self.caps[rank]:g}, and one micro-batch alone needs {need:g} there; raise the cap"
                )

    @classmethod
    def of(cls, placement: Placement, costs: Costs, *, peak: float | None = None, split: bool = True) -> Problem:
        """A cap in micro-batches of 1/D of the model, D the number of ranks; no cap when None."""
        share = placement.num_ranks / placement.num_stages
        cap = float("inf") if peak is None else peak + 1e-9
        return cls(placement, costs, (cap,) * placement.num_ranks, (share,) * placement.num_stages, split)

    @property
    def num_cells(self) -> int:
        """Micro-batches times stages."""
        return self.placement.num_stages * self.placement.n_microbatches

    def rank_of(self) -> list[int]:
        """The rank of every cell."""
        place = self.placement
        return [rank for pipe in place.pipe_of for rank in place.pipes[pipe]]

    def least(self) -> list[float]:
        """By rank, what the most demanding micro-batch alone holds there."""
        place = self.placement
        most = [0.0] * place.num_ranks
        for pipe in place.pipes:
            held = [0.0] * place.num_ranks
            for stage, rank in enumerate(pipe):
                held[rank] += self.holds[stage]
            most = list(map(max, most, held))
        return most

    def hops(self) -> tuple[list[list[float]], list[list[float]]]:
        """Seconds on the way by pipe and stage s: forwards from s to s+1, gradients from s+1 to s; 0 within a rank."""
        place, costs = self.placement, self.costs
        seconds = [costs.boundary_seconds(stage) for stage in range(place.num_stages - 1)]
        ways = [
            [
                0.0 if here == there and stage not in self.away else seconds[stage]
                for stage, (here, there) in enumerate(itertools.pairwise(pipe))
            ]
            for pipe in place.pipes
        ]
        return ways, ways

    def peaks(self, plan: Plan) -> list[float]:
        """By rank, the most that a plan holds at once."""
        stages, most = self.placement.num_stages, []
        for ops in plan.ranks:
            held = peak = 0.0
            for op in ops:
                cell, kind = divmod(op, 3)
                if kind == F:
                    held += self.holds[cell % stages]
                    peak = max(peak, held)
                elif kind == W or plan.fused[cell]:
                    held -= self.holds[cell % stages]
            most.append(peak)
        return most

    def fits(self, plan: Plan) -> bool:
        """Whether a plan stays within the caps."""
        return all(peak <= cap + 1e-6 for peak, cap in zip(self.peaks(plan), self.caps, strict=True))

    def order(self, plan: Plan, name: str) -> Order:
        """The plan as an order."""
        return Order(name, self.placement, tuple(tuple(self._actions(ops, plan.fused)) for ops in plan.ranks))

    def _actions(self, ops: Sequence[int], fused: Sequence[bool]) -> list[Action]:
        stages = self.placement.num_stages
        kinds = (Kind.F, Kind.I, Kind.W)
        found = []
        for op in ops:
            cell, kind = divmod(op, 3)
            microbatch, stage = divmod(cell, stages)
            found.append(Action(stage, Kind.B if kind == X and fused[cell] else kinds[kind], microbatch))
        return found

    def plan(self, order: Order) -> Plan:
        """An order of this placement as a plan; messages are left out."""
        stages = self.placement.num_stages
        fused = [False] * self.num_cells
        ranks: list[list[int]] = []
        for actions in order.ranks:
            ops = []
            for action in actions:
                if action.kind.is_compute:
                    assert action.microbatch is not None
                    cell = action.microbatch * stages + action.stage
                    ops.append(3 * cell + {Kind.F: F, Kind.W: W}.get(action.kind, X))
                    fused[cell] |= action.kind is Kind.B
            ranks.append(ops)
        return Plan(ranks, fused)
