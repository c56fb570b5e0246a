"""The cut, the order and its shape, planned together: each is best only for the others.

    for every shape         rough order for equal stages  ->  cut judged by it  ->  order for its stages
    for the soonest two     cut judged by that order  ->  the better of the two cuts  ->  order for its stages
    for the soonest         the best order for its stages

Shapes are one way, V (two stages a rank, one copy of the weights), both directions, and both with V.  Searches count operations,
not seconds, so every rank finds the same.

With a cap in bytes, what a rank may hold of activations is what the cap leaves after parameters, gradients, optimizer state,
mirrors and messages; that depends on shape and cut.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from fxchimera.errors import PartitionError, ScheduleError
from fxchimera.planner.choose import Memory, choose_cut
from fxchimera.planner.found import Choice, searched
from fxchimera.planner.link import Measures
from fxchimera.planner.memory import Sizes
from fxchimera.planner.pace import makespan_of
from fxchimera.planner.relief import Relief
from fxchimera.planner.table import costs_of
from fxchimera.schedule.bounds import lower_bound
from fxchimera.schedule.limits import Limits
from fxchimera.schedule.order import Order
from fxchimera.schedule.profile import Costs
from fxchimera.schedule.templates import Shape, shapes
from fxchimera_passes.captured import Captured
from fxchimera_passes.cost import NodeCosts
from fxchimera_passes.plan import StagePlan
from fxchimera_passes.points import Place
from fxchimera_passes.stages import Ground

__all__ = ["Joint"]

# Of search: for equal stages, to judge a first cut; for its stages, to judge shapes and a second cut; for the order that runs.
_FIRST, _SECOND, _LAST = 0.05, 0.05, 0.3
_SHAPES = frozenset({"one-way", "v", "bidirectional", "bidirectional-v"})
_FINALISTS = 2
_WORTH = 0.01  # more copies of the weights, or more stages on a rank, must save so much of a step's seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """What is to be planned.

    Args:
        num_ranks: Ranks D, one or two stages of a pipe each.
        n_microbatches: Micro-batches N.
        copies: Copies of the weights that an order may use, 1 or 2.
        split_points: Modules that begin a stage, D-1 or 2D-1; then only the order is searched.
        sizes: Bytes of the model's parameters.
        caps: Bytes of each rank, or empty: then a rank holds at most D micro-batches of its stage.
        measures: What the costs take for granted about the machine.
        relief: What the stages compute again.
    """

    captured: Captured
    costs: NodeCosts
    num_ranks: int
    n_microbatches: int
    copies: int
    split_points: Sequence[Place]
    sizes: Sizes
    caps: tuple[int, ...]
    measures: Measures
    relief: Relief | None = None

    def choose(self) -> Choice:
        """Plan.

        Raises:
            PartitionError: The model cannot be cut, or not within the caps.
            ScheduleError: D or N is below 1.
        """
        ground = Ground.of(self.captured, self.costs)
        found = self._started(ground)
        if len(found) > 1:
            least = min(choice.seconds for choice in found)
            found = [one for one in found if lower_bound(one.problem).seconds * (1.0 - _WORTH) < least or one.seconds == least]
            found = [self._ordered(choice, _SECOND) for choice in found]
        if not self.split_points and self.num_ranks > 1:
            for choice in sorted(found, key=lambda choice: choice.seconds)[:_FINALISTS]:
                found[found.index(choice)] = self._recut(choice, ground)
        return self._ordered(_preferred(found), _LAST)

    def _started(self, ground: Ground) -> list[Choice]:
        """A cut and a rough order of every shape, those with few copies first, then those with few stages."""
        found: list[Choice] = []
        refused: PartitionError | None = None  # that of the shape with the fewest bytes counts
        for shape in sorted(self._shapes(), key=lambda shape: (shape.copies, shape.chunks)):
            try:
                choice = self._first(shape, ground)
            except PartitionError as error:
                refused = refused or error
                continue
            if shape.chunks == 1 or self.split_points or not choice.cut.notes:  # too coarse a model for 2D stages
                found.append(choice)
        if not found:
            assert refused is not None
            raise refused
        return found

    def _shapes(self) -> list[Shape]:
        chunks = {1, 2}
        if self.split_points:
            chunks = {2 if len(self.split_points) == 2 * self.num_ranks - 1 else 1}
        known = shapes(self.num_ranks, self.n_microbatches)
        found = [one for one in known if one.name in _SHAPES and one.copies <= self.copies and one.chunks in chunks]
        return found or [known[0]]

    def _first(self, shape: Shape, ground: Ground) -> Choice:
        """A cut judged by an order for equal stages; with caps, by one that holds fewer micro-batches if need be."""
        ranks = self.num_ranks
        refused: PartitionError | None = None
        for peak in sorted({ranks, (ranks + 1) // 2, 1}, reverse=True) if self.caps else (ranks,):
            limits = Limits(peak=float(peak), copies=shape.copies, chunks=shape.chunks, shapes=(shape.name,))
            try:
                order = searched(ranks, self.n_microbatches, Costs.uniform(ranks), limits, _FIRST)
                return self._choice(self._cut(order, ground), order, dataclasses.replace(limits, peak=float(ranks)))
            except PartitionError as error:
                refused = error
            except ScheduleError:  # no order with so few was found
                continue
        assert refused is not None
        raise refused

    def _recut(self, choice: Choice, ground: Ground) -> Choice:
        """The better cut for the order of a choice, with the order for its stages."""
        with contextlib.suppress(PartitionError):  # the first cut fits, but is not found from this order
            makespan = makespan_of(choice.order)
            second = self._cut(choice.order, ground)
            if makespan(costs_of(second.stages, self.measures)) < makespan(costs_of(choice.cut.stages, self.measures)):
                return self._ordered(self._choice(second, choice.order, choice.limits), _SECOND)
        return choice

    def _ordered(self, choice: Choice, seconds: float) -> Choice:
        """The best order for the stages of a choice: its own, which fits, or what the search finds."""
        try:
            order = searched(self.num_ranks, self.n_microbatches, choice.problem.costs, choice.limits, seconds)
        except ScheduleError:  # what is left is just enough for the order that is known
            return choice
        return min(choice, self._choice(choice.cut, order, choice.limits), key=lambda one: one.seconds)

    def _cut(self, order: Order, ground: Ground) -> StagePlan:
        memory = Memory.of(order, self.sizes, self.caps)
        return choose_cut(self.captured, self.costs, order, self.split_points, memory, self.measures, ground, self.relief)

    def _choice(self, cut: StagePlan, order: Order, limits: Limits) -> Choice:
        if self.caps:
            needed = Memory.of(order, self.sizes, self.caps).needed(cut.stages)
            left = tuple(float(cap - need.total + need.activations) for cap, need in zip(self.caps, needed, strict=True))
            held = tuple(float(stage.activation_bytes) for stage in cut.stages)
            limits = dataclasses.replace(limits, peak=None, capacity=left, activation_bytes=held)
        return Choice.of(cut, order, limits, self.measures, self.sizes)


def _preferred(found: Sequence[Choice]) -> Choice:
    """The soonest, or one almost as soon with fewer copies of the weights, or fewer stages on a rank."""
    least = min(choice.seconds for choice in found)
    return next(choice for choice in found if choice.seconds * (1.0 - _WORTH) <= least)
