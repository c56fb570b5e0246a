"""From measured stages to what a plan is made of.

    stages 0..D-1: F, B, I, W     ->  costs of the present cut                       exact, stage by stage
    nodes one by one              ->  every node's seconds, for other cuts           each stage's nodes scaled to what it took
    all of them together          ->  price of a split backward, link                one figure for any cut

A node by itself is timed with what calling it costs, which within a stage is hardly anything; so nodes tell shares of a stage only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from fxchimera.planner.caps import Cap
from fxchimera.planner.draft import Auto, Draft, arrange
from fxchimera.planner.link import Link, Measures
from fxchimera.planner.pace import step_seconds
from fxchimera.planner.relief import AUTO, Recompute
from fxchimera.planner.table import Plan, costs_of
from fxchimera.schedule.certificate import certify
from fxchimera.schedule.measurement import Measurement, StageTimes
from fxchimera.schedule.order import Order
from fxchimera.schedule.profile import Costs, SyncEdge
from fxchimera_passes.cost import NodeCosts
from fxchimera_passes.plan import Stage, StagePlan
from fxchimera_passes.points import Place

__all__ = ["calibrated", "costs_by_stage", "measured_plan", "measures_of", "replanned"]


def costs_by_stage(stages: Sequence[Stage], found: Measurement, sync: tuple[SyncEdge, ...] = (), *, shared: bool = False) -> Costs:
    """Return the schedule's view of stages that were measured.

    ``sync`` is what mirrors and owners exchange; where ranks are threads that share memory (``shared``) its bytes do not travel.
    """
    halves = [times.halves for times in found.stages]
    return Costs(
        forward=tuple(times.forward for times in found.stages),
        input_grad=tuple(first for first, _ in halves),
        weight_grad=tuple(second for _, second in halves),
        backward=tuple(times.backward for times in found.stages),
        latency=found.latency,
        bytes_per_second=found.bytes_per_second,
        boundary_bytes=tuple(stage.sent_bytes for stage in stages[:-1]),
        sync=sync,
        sync_bytes_per_second=math.inf if shared else found.bytes_per_second,
    )


def measures_of(found: Measurement, stages: Sequence[Stage]) -> Measures:
    """Return what the stages and links together say of any cut of the model on this machine."""
    times = found.stages
    again = sum(map(_again, stages, times))
    forward, whole = sum(one.forward for one in times), sum(one.backward for one in times) - again
    first, second = sum(one.input_grad for one in times) - again, sum(one.weight_grad for one in times)
    both = first + second
    return Measures(
        link=Link(found.latency, found.bytes_per_second),
        split_price=max(0.0, both / whole - 1.0) if whole > 0.0 else 0.0,
        input_share=max(0.0, first / both) if both > 0.0 else 0.5,
        split_forward=max(0.0, sum(one.split_forward for one in times) / forward - 1.0) if forward else 0.0,
    )


def calibrated(cut: StagePlan, shares: NodeCosts, found: Sequence[StageTimes]) -> NodeCosts:
    """Scale the nodes of every stage to the seconds that it took, forward and backward apart, and what of that was W.

    ``shares`` tell what each node takes beside others of its stage; where that is nothing for all, they are taken for equal.  A
    node of which nothing can be put off stays so.
    """
    forward, backward = dict(shares.forward), dict(shares.backward)
    deferrable = None if shares.deferrable is None else dict(shares.deferrable)
    scaled = set[str]()
    for stage, times in zip(cut.stages, found, strict=True):
        own = [name for name in stage.nodes if name not in scaled]  # the others are computed again, and are cheap
        scaled.update(own)
        _scale(forward, own, times.forward)
        plain, again = times.backward - _again(stage, times), _again(stage, times)
        _scale(backward, own, plain)
        both = times.input_grad + times.weight_grad - again
        if deferrable is not None and any(deferrable.get(name) for name in own):
            _scale(deferrable, own, plain * min(1.0, times.weight_grad / both) if both > 0.0 else 0.0)
            deferrable |= {name: min(deferrable[name], backward[name]) for name in own}
    return NodeCosts(forward, backward, deferrable)


def _again(stage: Stage, times: StageTimes) -> float:
    """Seconds of a measured backward in which a part of the forward runs again: the part that the plan says."""
    part = stage.recompute_seconds / stage.forward_seconds if stage.forward_seconds else 0.0
    return min(part * times.forward, times.backward)


def _scale(seconds: dict[str, float], names: Sequence[str], wanted: float) -> None:
    present = sum(seconds.get(name, 0.0) for name in names)
    for name in names:
        seconds[name] = seconds.get(name, 0.0) * wanted / present if present else wanted / len(names)


def measured_plan(plan: Plan, found: Measurement, *, shared: bool) -> Plan:
    """Return the plan with the measured seconds in its stages, costs and certificate; ``shared``: its ranks are threads."""
    stages = tuple(
        dataclasses.replace(
            stage, forward_seconds=times.forward, backward_seconds=times.backward, recompute_seconds=_again(stage, times)
        )
        for stage, times in zip(plan.stages, found.stages, strict=True)
    )
    seconds = [stage.cost_seconds for stage in stages]
    cut = dataclasses.replace(
        plan.cut, stages=stages, bottleneck_seconds=max(seconds), bound_seconds=min(max(seconds), sum(seconds) / len(seconds))
    )
    costs = costs_by_stage(stages, found, plan.costs.sync, shared=shared)
    certificate, measures = certify(plan.order, costs), measures_of(found, plan.stages)
    return dataclasses.replace(plan, cut=cut, costs=costs, certificate=certificate, measures=measures)


def replanned(
    made: Draft,
    found: Measurement,
    shares: NodeCosts,
    order: Order | Auto,
    *,
    split_points: Sequence[Place] = (),
    memory: Cap | Sequence[Cap] | None = None,
    optimizer_values: float = 2.0,
    recompute: Recompute = AUTO,
    shared: bool = False,
) -> Draft:
    """Plan the recording of ``made`` again, from what its stages and their nodes took; it stays as it is where no plan is sooner.

    ``shares`` has all the nodes of a stage or none; then those are estimated that ``made`` was planned with.

    Raises:
        PartitionError: It cannot be cut within ``memory``.
    """
    before, backward = made.costs, {**made.costs.backward, **shares.backward}
    waits = {
        name: seconds / before.backward[name] * backward[name] for name, seconds in (before.deferrable or {}).items() if seconds
    }
    known = NodeCosts({**before.forward, **shares.forward}, backward, None if before.deferrable is None else waits)
    measures, costs = measures_of(found, made.cut.stages), calibrated(made.cut, known, found.stages)
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
    plan = measured_plan(made.plan, found, shared=shared)
    as_before = costs_of(plan.stages, measures, plan.costs.sync)
    if step_seconds(again.order, again.plan.costs) < step_seconds(made.order, as_before):
        return again
    return dataclasses.replace(made, costs=costs, cut=plan.cut, plan=plan)
