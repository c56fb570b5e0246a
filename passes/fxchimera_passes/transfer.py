"""Keep the cut of one recording in another recording of the same model: another batch size, or eval mode.

Recordings of one model agree on most nodes, not on all (no dropout in eval mode, other masks for other shapes, a layer left out).
What reads a parameter keeps its stage.  Between such nodes others are matched by an anchor: (operation, target, owning module,
line, how many like it came before).  Each cut must fall between the last node so placed before it and the first after it; among the
legal places there the one that sends least is taken.  A stage may be left without any operation.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fxchimera_passes.analytic import NodeCosts, analytic
from fxchimera_passes.assemble import assemble
from fxchimera_passes.atoms import parameter_reads
from fxchimera_passes.captured import Captured, info
from fxchimera_passes.errors import PartitionError
from fxchimera_passes.liveness import Liveness, obstacle, sweep
from fxchimera_passes.plan import NONE, Stage, StagePlan
from fxchimera_passes.recomputation import Recomputation

__all__ = ["transfer"]

_Anchor = tuple[str, str, str, str, int]


def transfer(captured: Captured, plan: StagePlan, other: Captured) -> StagePlan:
    """Cut ``other`` where ``plan`` cuts ``captured``; every parameter keeps its owner.

    What reads a parameter stays in the parameter's stage, and the rest follows as far as it is found again; a stage none of whose
    operations is there is left empty.

    Seconds are those of ``plan`` scaled by how much more or less work the analytic costs see in ``other``.

    Raises:
        PartitionError: a cut falls where nothing may be cut, or a stage would read a parameter that it did not read before.
    """
    live = sweep(other)
    costs = analytic(other)
    before = analytic(captured)
    positions = _positions(captured, plan, live)
    stages = assemble(other, live, costs, positions, plan.owner)
    again = Recomputation.of(other, costs) if any(stage.recompute != NONE for stage in plan.stages) else None
    if again is not None:
        stages = tuple(again.applied(new, old.recompute) for new, old in zip(stages, plan.stages, strict=True))
    scaled = tuple(_checked(new, old, before) for new, old in zip(stages, plan.stages, strict=True))
    bottleneck = max(stage.cost_seconds for stage in scaled)
    bound = plan.bound_seconds * bottleneck / plan.bottleneck_seconds if plan.bottleneck_seconds else 0.0
    return StagePlan(stages=scaled, owner=plan.owner, bottleneck_seconds=bottleneck, bound_seconds=bound)


def _anchors(nodes: Sequence[fx.Node]) -> list[_Anchor]:
    seen: Counter[tuple[str, str, str, str]] = Counter()
    found = []
    for node in nodes:
        target = node.target if isinstance(node.target, str) else _function_name(node.target)
        line = "" if node.op == "call_module" else info(node).line  # a module may be called from anywhere
        key = (node.op, target, info(node).module, line)
        found.append((*key, seen[key]))
        seen[key] += 1
    return found


def _function_name(function: Any) -> str:
    # a method of a C type has no module, an object that is called has no qualified name
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _positions(captured: Captured, plan: StagePlan, live: Liveness) -> list[int]:
    nodes = tuple(captured.graph.nodes)
    anchors = dict(zip((node.name for node in nodes), _anchors(nodes), strict=True))
    carried = set(live.carried)
    moving = {nodes[i].name for i in sweep(captured).recomputed}
    found = {anchor: i for i, anchor in enumerate(_anchors(live.nodes)) if i in carried}
    strong = _ascending(_readers(captured, plan, live))
    weak = [
        (found[anchors[name]], stage.index)
        for stage in plan.stages
        for name in stage.nodes
        if name not in moving and anchors[name] in found
    ]
    kept = [*strong, *(pair for pair in _ascending(weak) if _fits(pair, strong))]
    idle = next((stage.index for stage in plan.stages if stage.nodes), 0)
    idle = max([idle, *(stage for place, stage in kept if place == live.carried[0])])  # this path may begin in a later stage
    positions = [0] * idle  # the first stages compute nothing
    for number in range(idle, len(plan.stages) - 1):
        low = max([place for place, stage in kept if stage <= number], default=live.carried[0] if live.carried else 0)
        high = min([place for place, stage in kept if stage > number], default=len(live.nodes) - 1)
        positions.append(_between(live, max([low + 1, *positions]), high))
    return positions


def _readers(captured: Captured, plan: StagePlan, live: Liveness) -> list[tuple[int, int]]:
    """The nodes that read a parameter which only one stage reads, with that stage."""
    stages: dict[str, list[int]] = {}
    for stage in plan.stages:
        for name in stage.parameters:
            stages.setdefault(name, []).append(stage.index)
    found = []
    for i, names in parameter_reads(captured, live).items():
        where = {stages[name][0] for name in names if len(stages.get(name, ())) == 1}
        if len(where) == 1 and i < len(live.nodes) - 1:
            found.append((i, where.pop()))
    return found


def _fits(pair: tuple[int, int], strong: Sequence[tuple[int, int]]) -> bool:
    """Whether a node between two of ``strong`` is taken for one of a stage between theirs."""
    place, stage = pair
    after = bisect_right(strong, place, key=lambda other: other[0])
    return (not after or strong[after - 1][1] <= stage) and (after == len(strong) or stage <= strong[after][1])


def _ascending(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The most of ``pairs`` (place, stage), ordered by place, whose stages do not descend."""
    ordered = sorted(pairs)
    return [ordered[k] for k in _longest_ascending([(stage, place) for place, stage in ordered])]


def _longest_ascending(values: Sequence[tuple[int, int]]) -> list[int]:
    """Indices of a longest strictly ascending run in ``values``, not necessarily of neighbours."""
    ends: list[tuple[int, int]] = []
    tails: list[int] = []
    before: list[int] = []
    for index, value in enumerate(values):
        place = bisect_left(ends, value)
        before.append(tails[place - 1] if place else -1)
        ends[place : place + 1] = [value]
        tails[place : place + 1] = [index]
    run: list[int] = []
    index = tails[-1] if tails else -1
    while index >= 0:
        run.append(index)
        index = before[index]
    return run[::-1]


def _between(live: Liveness, first: int, last: int) -> int:
    """The legal position from ``first`` to ``last`` that sends least."""
    legal = live.cuttable[bisect_left(live.cuttable, first) : bisect_right(live.cuttable, last)]
    if not legal and last == len(live.nodes) - 1:
        return last  # nothing is left for the later stages
    if not legal:
        raise PartitionError(
            f"the cut before {live.nodes[last].name!r} cannot be kept in the other recording: {obstacle(live, last)}. "
            "Give split_points= instead"
        )
    return min(legal, key=lambda position: live.crossing_bytes[position])


def _checked(new: Stage, old: Stage, before: NodeCosts) -> Stage:
    extra = [name for name in new.parameters if name not in old.parameters]
    if extra:
        raise PartitionError(
            f"stage {new.index} would read parameters {extra[:3]} in the other recording, which it did not read in the first: "
            "the model takes another path there. Keep what the paths do not share in one submodule"
        )
    forward = _scaled(old.forward_seconds, new.forward_seconds, old.nodes, before.forward)
    once, estimate = old.backward_seconds - old.recompute_seconds, new.backward_seconds - new.recompute_seconds
    again = old.recompute_seconds * forward / old.forward_seconds if old.forward_seconds else 0.0
    return replace(
        new,
        owned=old.owned,
        parameter_bytes=old.parameter_bytes,
        forward_seconds=forward,
        backward_seconds=_scaled(once, estimate, old.nodes, before.backward) + again,
        recompute_seconds=again,
    )


def _scaled(seconds: float, estimate: float, nodes: Sequence[str], before: Mapping[str, float]) -> float:
    base = sum(before.get(name, 0.0) for name in nodes)
    return seconds * estimate / base if base else seconds
