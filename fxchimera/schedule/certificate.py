"""What an order costs and how far it can be from the best: printed with every schedule.

Bubbles come in two kinds, and the literature quotes both.  With a barrier (gradient clipping, optimizer step) the bubble is the
makespan minus the ideal; the span bubble is what is left when steps overlap, the idle seconds between a rank's own first and last
action, on the worst rank.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from fxchimera.errors import ScheduleError
from fxchimera.schedule.action import Kind
from fxchimera.schedule.bounds import lower_bound
from fxchimera.schedule.order import Order
from fxchimera.schedule.problem import Plan, Problem
from fxchimera.schedule.profile import Costs
from fxchimera.schedule.shop import NEVER, accept, make_shop, retime

__all__ = ["Certificate", "certify"]


@dataclass(frozen=True, slots=True)
class Certificate:
    """Figures of one order under given costs; times in seconds, for compute and messages between stages.

    Args:
        schedule: The order's name.
        makespan: Start of the first to end of the last action, with a barrier.
        ideal: All work, with backwards in their cheaper form, spread evenly over the ranks.
        bubble: ``makespan - ideal``, with a barrier.
        span_bubble: Most idle seconds between a rank's own first and last action.
        lower_bound: No order of this placement within these caps takes less.
        argument: Why.
        gap: Share by which the makespan is above the bound; 0 is proven optimal.
        peak_activations: By rank, micro-batches held at once, in units of 1/D of the model.
        weight_copies: Copies of the weights.
        splits: Backwards that are split in two.
        messages: Messages between stages.
        message_bytes: Their bytes, 0 where the costs name none.
    """

    schedule: str
    makespan: float
    ideal: float
    bubble: float
    span_bubble: float
    lower_bound: float
    argument: str
    gap: float
    peak_activations: tuple[float, ...]
    weight_copies: int
    splits: int
    messages: int
    message_bytes: int

    def __str__(self) -> str:
        share = self.bubble / self.makespan if self.makespan else 0.0
        return (
            f"{self.schedule}: {self.makespan:.6g} s, bubble with a barrier {self.bubble:.6g} s ({share:.1%}), "
            f"within the ranks' spans {self.span_bubble:.6g} s; no order of this shape takes less than {self.lower_bound:.6g} s "
            f"({self.argument}), so this one is at most {self.gap:.1%} from the best; "
            f"peak activations {max(self.peak_activations):g}, {self.weight_copies} weight copies"
        )

    def as_dict(self) -> dict[str, object]:
        """The fields, and the peak of all ranks as ``peak_activations``; ready for JSON."""
        found = dataclasses.asdict(self)
        return {**found, "peak_activations": max(self.peak_activations), "peak_activations_by_rank": list(self.peak_activations)}


def certify(
    order: Order, costs: Costs, *, peak: float | None = None, split: bool = True, problem: Problem | None = None
) -> Certificate:
    """The certificate of an order.

    Args:
        order: An order, lowered or not.
        costs: One entry for every stage of the order's placement.
        peak: The cap on activations that the bound may rely on, in micro-batches of 1/D of the model; the order's own when None.
        split: Whether the orders it is compared with may split backwards.
        problem: The caps in another unit, instead of ``peak``.

    Raises:
        ScheduleError: The costs cover another number of stages, or the order cannot proceed.
    """
    free = Problem.of(order.placement, costs, split=split)
    plan = free.plan(order)
    peaks = free.peaks(plan)
    limited = problem or Problem.of(order.placement, costs, peak=max(peaks) if peak is None else peak, split=split)
    bound = lower_bound(limited)
    makespan, span_bubble = _run(free, plan)
    ideal = ideal_seconds(free)
    messages, size = _messages(order, costs)
    return Certificate(
        schedule=order.name,
        makespan=makespan,
        ideal=ideal,
        bubble=makespan - ideal,
        span_bubble=span_bubble,
        lower_bound=makespan if abs(bound.seconds - makespan) <= 1e-9 * makespan else bound.seconds,  # sums differ in the last bit
        argument=bound.argument,
        gap=max(0.0, makespan / bound.seconds - 1.0 - 1e-12) if bound.seconds else 0.0,
        peak_activations=tuple(peaks),
        weight_copies=order.placement.weight_copies,
        splits=sum(1 for _, action in order if action.kind is Kind.I),
        messages=messages,
        message_bytes=size,
    )


def _run(problem: Problem, plan: Plan) -> tuple[float, float]:
    """Makespan, and the most idle seconds between a rank's own first and last operation.

    Raises:
        ScheduleError: The ranks wait for each other.
    """
    shop = make_shop(problem, plan)
    makespan = retime(shop, NEVER, -1.0, -1, 0)
    if makespan >= NEVER:
        raise ScheduleError("the order cannot proceed: its ranks wait for each other; check(lower(order)) names the actions")
    accept(shop)
    busy = [sum(shop.seconds[op] for op in row) for row in plan.ranks]
    spans = [shop.end[row[-1]] - shop.end[row[0]] + shop.seconds[row[0]] for row in plan.ranks]
    return makespan, max(span - seconds for span, seconds in zip(spans, busy, strict=True))


def ideal_seconds(problem: Problem) -> float:
    """All work of a step, with backwards in their cheaper form where they may be split, over the number of ranks."""
    costs, place = problem.costs, problem.placement
    work = 0.0
    for stage in range(place.num_stages):
        whole = costs.full_backward(stage)
        halves = costs.input_grad[stage] + costs.weight_grad[stage]
        work += costs.forward[stage] + (min(whole, halves) if problem.split else whole)
    return work * place.n_microbatches / place.num_ranks


def _messages(order: Order, costs: Costs) -> tuple[int, int]:
    """Messages between stages of one step, and their bytes."""
    place, count, size = order.placement, 0, 0
    both = 1 if order.is_forward_only else 2
    for pipe, ranks in enumerate(place.pipes):
        for stage in range(place.num_stages - 1):
            if ranks[stage] != ranks[stage + 1]:
                messages = both * len(place.microbatches(pipe))
                count += messages
                size += messages * (costs.boundary_bytes[stage] if costs.boundary_bytes else 0)
    return count, size
