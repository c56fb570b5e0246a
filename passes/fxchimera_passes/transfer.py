"""Keep the cut of one recording in another recording of the same model: another batch size, or eval mode.

Recordings of one model agree on most nodes but not on all (no dropout in eval mode, other masks for other shapes).  A node's anchor
is (operation, target, owning module, how many like it came before); each cut must fall between the last node that both recordings
have before it and the first one that both have after it, and among the legal places there the one that sends least is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import fx

from fxchimera_passes.analytic import NodeCosts, analytic
from fxchimera_passes.assemble import assemble
from fxchimera_passes.captured import Captured, info
from fxchimera_passes.errors import PartitionError
from fxchimera_passes.liveness import Liveness, obstacle, sweep
from fxchimera_passes.plan import Stage, StagePlan

__all__ = ["transfer"]

_Anchor = tuple[str, str, str, int]


def transfer(captured: Captured, plan: StagePlan, other: Captured) -> StagePlan:
    """Cut ``other`` where ``plan`` cuts ``captured``; every parameter keeps its owner.

    Seconds are those of ``plan`` scaled by how much more or less work the analytic costs see in ``other``.

    Raises:
        PartitionError: a cut's anchor is gone or cannot be cut, or a stage would read a parameter that it did not read before.
    """
    live = sweep(other)
    costs = analytic(other)
    before = analytic(captured)
    positions = _positions(captured, plan, live)
    stages = assemble(other, live, costs, positions, plan.owner)
    scaled = tuple(_checked(new, old, before) for new, old in zip(stages, plan.stages, strict=True))
    bottleneck = max(stage.cost_seconds for stage in scaled)
    bound = plan.bound_seconds * bottleneck / plan.bottleneck_seconds if plan.bottleneck_seconds else 0.0
    return StagePlan(stages=scaled, owner=plan.owner, bottleneck_seconds=bottleneck, bound_seconds=bound)


def _anchors(nodes: Sequence[fx.Node]) -> list[_Anchor]:
    seen: Counter[tuple[str, str, str]] = Counter()
    found = []
    for node in nodes:
        target = node.target if isinstance(node.target, str) else _function_name(node.target)
        key = (node.op, target, info(node).module)
        found.append((*key, seen[key]))
        seen[key] += 1
    return found


def _function_name(function: Any) -> str:
    # a method of a C type has no module, an object that is called has no qualified name
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _positions(captured: Captured, plan: StagePlan, live: Liveness) -> list[int]:
    nodes = tuple(captured.graph.nodes)
    names = dict(zip((node.name for node in nodes), _anchors(nodes), strict=True))
    carried = set(live.carried)
    moving = {nodes[i].name for i in sweep(captured).recomputed}
    found = {anchor: i for i, anchor in enumerate(_anchors(live.nodes)) if i in carried}
    places = [[(name, found[names[name]]) for name in s.nodes if name not in moving and names[name] in found] for s in plan.stages]
    positions: list[int] = []
    for number, (left, right) in enumerate(pairwise(places)):
        if not left or not right:
            missing = plan.stages[number if not left else number + 1]
            raise PartitionError(
                f"stage {missing.index}, which begins at {missing.nodes[0]!r}, has no operation in the other recording"
            )
        positions.append(_between(live, max(i for _, i in left), min(right, key=lambda place: place[1])))
    return positions


def _between(live: Liveness, last: int, first: tuple[str, int]) -> int:
    name, end = first
    legal = live.cuttable[bisect_right(live.cuttable, last) : bisect_right(live.cuttable, end)]
    if not legal:
        why = "the order of operations changed" if last >= end else obstacle(live, end)
        raise PartitionError(f"the cut before {name!r} cannot be kept in the other recording: {why}. Give split_points= instead")
    return min(legal, key=lambda position: live.crossing_bytes[position])


def _checked(new: Stage, old: Stage, before: NodeCosts) -> Stage:
    extra = [name for name in new.parameters if name not in old.parameters]
    if extra:
        raise PartitionError(
            f"stage {new.index} would read parameters {extra[:3]} in the other recording, which it did not read in the first: "
            "the model takes another path there"
        )
    return replace(
        new,
        owned=old.owned,
        parameter_bytes=old.parameter_bytes,
        forward_seconds=_scaled(old.forward_seconds, new.forward_seconds, old.nodes, before.forward),
        backward_seconds=_scaled(old.backward_seconds, new.backward_seconds, old.nodes, before.backward),
    )


def _scaled(seconds: float, estimate: float, nodes: Sequence[str], before: Mapping[str, float]) -> float:
    base = sum(before.get(name, 0.0) for name in nodes)
    return seconds * estimate / base if base else seconds
