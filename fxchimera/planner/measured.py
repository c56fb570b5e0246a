"""From measured stages to what a plan is made of.

    stages 0..D-1: F, B, I, W     ->  costs of the present cut                       exact, stage by stage
    nodes one by one              ->  every node's seconds, for other cuts           each stage's nodes scaled to what it took
    all of them together          ->  price of a split backward, link                one figure for any cut

A node by itself is timed with what calling it costs, which within a stage is hardly anything; so nodes tell shares of a stage only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from fxchimera.planner.caps import Cap
from fxchimera.planner.draft import Auto, Draft, arrange
from fxchimera.planner.link import Link, Measures
from fxchimera.planner.pace import makespan_of
from fxchimera.planner.relief import AUTO, Recompute
from fxchimera.planner.table import Plan, costs_of
from fxchimera.schedule.certificate import certify
from fxchimera.schedule.measurement import Measurement, StageTimes
from fxchimera.schedule.mirrors import sync_edges
from fxchimera.schedule.order import Order
from fxchimera.schedule.profile import Costs
from fxchimera_passes.cost import NodeCosts
from fxchimera_passes.plan import Stage, StagePlan

__all__ = ["calibrated", "costs_by_stage", "measured_plan", "measures_of", "replanned", "with_exchange"]


def costs_by_stage(stages: Sequence[Stage], found: Measurement) -> Costs:
    """Return the schedule's view of stages that were measured."""
    halves = [times.halves for times in found.stages]
    return Costs(
        forward=tuple(times.forward for times in found.stages),
        input_grad=tuple(first for first, _ in halves),
        weight_grad=tuple(second for _, second in halves),
        backward=tuple(times.backward for times in found.stages),
        latency=found.latency,
        bytes_per_second=found.bytes_per_second,
        boundary_bytes=tuple(stage.sent_bytes for stage in stages[:-1]),
    )


def measures_of(found: Measurement) -> Measures:
    """Return what the stages and links together say of any cut of the model on this machine."""
    forward, split, whole, first, second = (
        sum(column) for column in zip(*(dataclasses.astuple(times) for times in found.stages), strict=True)
    )
    both = first + second
    return Measures(
        link=Link(found.latency, found.bytes_per_second),
        split_price=max(0.0, both / whole - 1.0) if whole else 0.0,
        input_share=first / both if both else 0.5,
        split_forward=max(0.0, split / forward - 1.0) if forward else 0.0,
    )


def calibrated(cut: StagePlan, shares: NodeCosts, found: Sequence[StageTimes]) -> NodeCosts:
    """Scale the nodes of every stage to the seconds that it took, forward and backward apart.

    ``shares`` tell what each node takes beside others of its stage; where that is nothing for all, they are taken for equal.
    """
    forward, backward = dict(shares.forward), dict(shares.backward)
    scaled = set[str]()
    for stage, times in zip(cut.stages, found, strict=True):
        own = [name for name in stage.nodes if name not in scaled]  # the others are computed again, and are cheap
        scaled.update(own)
        _scale(forward, own, times.forward)
        again = times.forward * stage.recompute_seconds / stage.forward_seconds if stage.forward_seconds else 0.0
        _scale(backward, own, max(0.0, times.backward - again))
    return NodeCosts(forward, backward)


def _scale(seconds: dict[str, float], names: Sequence[str], wanted: float) -> None:
    present = sum(seconds.get(name, 0.0) for name in names)
    for name in names:
        seconds[name] = seconds.get(name, 0.0) * wanted / present if present else wanted / len(names)


def measured_plan(plan: Plan, found: Measurement) -> Plan:
    """Return the plan with the measured seconds in its stages, costs and certificate."""
    stages = tuple(
        dataclasses.replace(stage, forward_seconds=times.forward, backward_seconds=times.backward)
        for stage, times in zip(plan.stages, found.stages, strict=True)
    )
    seconds = [stage.cost_seconds for stage in stages]
    cut = dataclasses.replace(
        plan.cut, stages=stages, bottleneck_seconds=max(seconds), bound_seconds=min(max(seconds), sum(seconds) / len(seconds))
    )
    costs = costs_by_stage(stages, found)
    return dataclasses.replace(plan, cut=cut, costs=costs, certificate=certify(plan.order, costs), measures=measures_of(found))


def with_exchange(plan: Plan, sizes: Mapping[str, int]) -> Costs:
    """Return the plan's costs with what mirrors and owners exchange; ``sizes`` are the parameters' bytes."""
    edges = sync_edges(plan.cut, plan.placement, sizes)
    return dataclasses.replace(plan.costs, sync=edges, sync_bytes_per_second=plan.costs.bytes_per_second)


def replanned(
    made: Draft,
    found: Measurement,
    shares: NodeCosts,
    order: Order | Auto,
    *,
    split_points: Sequence[str] = (),
    memory: Cap | Sequence[Cap] | None = None,
    optimizer_values: float = 2.0,
    recompute: Recompute = AUTO,
) -> Draft:
    """Plan the recording of ``made`` again, from what its stages and their nodes took; it stays as it is where no plan is sooner.

    Raises:
        PartitionError: It cannot be cut within ``memory``.
    """
    measures, costs = measures_of(found), calibrated(made.cut, shares, found.stages)
    again = arrange(
        made.captured,
        costs,
        order,
        split_points=split_points,
        memory=memory,
        optimizer_values=optimizer_values,
        recompute=recompute,
        measures=measures,
    )
    plan = measured_plan(made.plan, found)
    if makespan_of(again.order)(costs_of(again.cut.stages, measures)) < makespan_of(made.order)(costs_of(plan.stages, measures)):
        return again
    return dataclasses.replace(made, costs=costs, cut=plan.cut, plan=plan)
