"""The cut and the order, planned together: each is best only for the other.

    rough order for equal stages  ->  cut judged by it  ->  rough order for its stages  ->  cut judged by that
                                      the better of the two cuts  ->  the best order for its stages

Searches count operations, not seconds, so every rank finds the same.

With a cap in bytes, what a rank may hold of activations is what the cap leaves after parameters, gradients, optimizer state,
mirrors and messages; that depends on the copies of the weights, so one and two copies are planned apart and the sooner wins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fxchimera.errors import PartitionError, ScheduleError
from fxchimera.planner.ascending import ascending
from fxchimera.planner.choose import Memory, choose_cut
from fxchimera.planner.memory import Sizes
from fxchimera.planner.pace import makespan_of
from fxchimera.planner.table import SPLIT_PRICE, costs_of
from fxchimera.schedule.auto import auto
from fxchimera.schedule.limits import Limits
from fxchimera.schedule.order import Order
from fxchimera.schedule.problem import Problem
from fxchimera.schedule.profile import Costs
from fxchimera_passes.captured import Captured
from fxchimera_passes.cost import NodeCosts
from fxchimera_passes.plan import StagePlan

__all__ = ["Choice", "Joint"]

# Of search: for equal stages, to judge a first cut; for its stages, to judge the second; and twice for the order that will run.
_FIRST, _SECOND, _LAST = 0.05, 0.1, 0.3


@dataclass(frozen=True, slots=True)
class Choice:
    """A cut, an order for its stages, and the problem that it solves: costs, and the limits that it keeps."""

    cut: StagePlan
    order: Order
    problem: Problem

    @property
    def makespan(self) -> float:
        """Predicted seconds of a step."""
        return makespan_of(self.order)(self.problem.costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """What is to be planned.

    Args:
        num_ranks: Ranks D, one stage of a pipe each.
        n_microbatches: Micro-batches N.
        copies: Copies of the weights that an order may use, 1 or 2.
        split_points: Modules that begin a stage; then only the order is searched.
        sizes: Bytes of the model's parameters.
        caps: Bytes of each rank, or empty: then a rank holds at most D micro-batches of its stage.
    """

    captured: Captured
    costs: NodeCosts
    num_ranks: int
    n_microbatches: int
    copies: int
    split_points: Sequence[str]
    sizes: Sizes
    caps: tuple[int, ...]

    def choose(self) -> Choice:
        """Plan.

        Raises:
            PartitionError: The model cannot be cut, or not within the caps.
            ScheduleError: D or N is below 1.
        """
        if not self.caps:
            return self._plan(Limits(peak=float(self.num_ranks), copies=self.copies, chunks=1))
        found: list[Choice] = []
        refused: PartitionError | None = None  # that of the shape with the fewest bytes counts
        for shape in ("one-way", "bidirectional") if min(self.copies, self.num_ranks, self.n_microbatches) > 1 else ("one-way",):
            try:
                found.append(self._plan(Limits(copies=self.copies, chunks=1, shapes=(shape,))))
            except PartitionError as error:
                refused = refused or error
        if not found:
            assert refused is not None
            raise refused
        return min(found, key=lambda choice: choice.makespan)  # at equal seconds one copy

    def _plan(self, limits: Limits) -> Choice:
        cut, order = self._first(limits)
        if self.split_points or self.num_ranks == 1:
            return self._ordered(cut, order, limits, (0.0, SPLIT_PRICE), _LAST)
        best = self._ordered(cut, order, limits, (0.0,), _SECOND)
        try:
            second = choose_cut(self.captured, self.costs, best.order, (), self._memory(best.order))
        except PartitionError:  # the first cut fits, but is not found from this order
            second = cut
        makespan = makespan_of(best.order)
        cut = min(cut, second, key=lambda one: makespan(costs_of(one.stages)))
        return self._ordered(cut, best.order, limits, (0.0, SPLIT_PRICE), _LAST)

    def _first(self, limits: Limits) -> tuple[StagePlan, Order]:
        """A cut judged by an order for equal stages; with caps, by one that holds fewer micro-batches if need be."""
        ranks = self.num_ranks
        refused: PartitionError | None = None
        for peak in sorted({ranks, (ranks + 1) // 2, 1}, reverse=True) if self.caps else (ranks,):
            rough = dataclasses.replace(limits, peak=float(peak))
            try:
                order = ascending(auto(ranks, self.n_microbatches, Costs.uniform(ranks), rough, seconds=_FIRST).order)
                return choose_cut(self.captured, self.costs, order, self.split_points, self._memory(order)), order
            except PartitionError as error:
                refused = error
            except ScheduleError:  # no order with so few was found
                continue
        assert refused is not None
        raise refused

    def _ordered(self, cut: StagePlan, known: Order, limits: Limits, prices: Sequence[float], seconds: float) -> Choice:
        """The best order for the stages of a cut: the one ``known``, which fits, or what the search finds.

        It searches once for each of ``prices`` of a split backward: where splitting costs nothing it gets further.
        """
        costs = costs_of(cut.stages)
        exact = limits if not self.caps else self._left(cut, known, limits)
        orders = [known]
        for price in prices:
            with contextlib.suppress(ScheduleError):  # what is left is just enough for the order that is known
                shown = _scaled(costs_of(cut.stages, split_price=price))
                orders.append(ascending(auto(self.num_ranks, self.n_microbatches, shown, exact, seconds=seconds).order))
        makespans = [makespan_of(order)(costs) for order in orders]
        least = min(makespans)
        order = orders[makespans.index(least)]
        return Choice(cut, order, _problem(order, costs, exact))

    def _memory(self, order: Order) -> Memory:
        return Memory.of(order, self.sizes, self.caps)

    def _left(self, cut: StagePlan, order: Order, limits: Limits) -> Limits:
        """Limits in bytes: what the caps leave for activations, with as many copies of the weights as ``order`` has."""
        needed = self._memory(order).needed(cut.stages)
        left = tuple(float(cap - need.total + need.activations) for cap, need in zip(self.caps, needed, strict=True))
        held = tuple(float(stage.activation_bytes) for stage in cut.stages)
        return dataclasses.replace(limits, peak=None, capacity=left, activation_bytes=held)


def _scaled(costs: Costs) -> Costs:
    """The costs in another unit, without rounding, so that a mean forward takes about 1: the search takes 1e-9 as equal."""
    mean = sum(costs.forward) / len(costs.forward)
    unit = 2.0 ** -round(math.log2(mean)) if mean else 1.0
    forward, first, second, whole = (
        tuple(unit * seconds for seconds in stages)
        for stages in (costs.forward, costs.input_grad, costs.weight_grad, costs.backward)
    )
    return dataclasses.replace(
        costs,
        forward=forward,
        input_grad=first,
        weight_grad=second,
        backward=whole,
        latency=unit * costs.latency,
        bytes_per_second=costs.bytes_per_second / unit,
    )


def _problem(order: Order, costs: Costs, limits: Limits) -> Problem:
    """The order's placement and costs with the limits it was found in: what its certificate may rely on."""
    if limits.capacity is None or limits.activation_bytes is None:
        return Problem.of(order.placement, costs, peak=limits.peak)
    return Problem(order.placement, costs, limits.capacity, limits.activation_bytes)
