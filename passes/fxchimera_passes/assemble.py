"""Turn cut positions into stages: the nodes, inputs, boundary values, parameters and costs of each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from fxchimera_passes.analytic import NodeCosts
from fxchimera_passes.atoms import canonical_names, parameter_bytes, parameter_readers, parameters_of
from fxchimera_passes.captured import Captured, info
from fxchimera_passes.liveness import Liveness, crossing, recomputed_for
from fxchimera_passes.plan import Stage

__all__ = ["assemble", "owners"]


def assemble(
    captured: Captured, live: Liveness, costs: NodeCosts, positions: Sequence[int], owner: Mapping[str, int]
) -> tuple[Stage, ...]:
    """Build the stages that begin at node 0 and at each of ``positions``; ``owner`` tells each parameter's stage."""
    ends = (*positions, len(live.nodes))
    owned: dict[int, list[str]] = {}
    for name in captured.parameters:
        owned.setdefault(owner[name], []).append(name)
    groups: list[list[int]] = [[] for _ in ends]
    for i in live.carried:
        groups[bisect_right(positions, i)].append(i)
    canonical = canonical_names(captured)
    received: tuple[int, ...] = (0, *positions)
    return tuple(
        _stage(captured, live, costs, canonical, number, group, received[number], ends[number], tuple(owned.get(number, ())))
        for number, group in enumerate(groups)
    )


def owners(captured: Captured, live: Liveness, positions: Sequence[int]) -> dict[str, int]:
    """The stage that owns each parameter: the first that reads it; a never-read one joins its nearest relative by name."""
    first = parameter_readers(captured, live)
    read = {name: bisect_right(positions, min(i, live.carried[-1])) for name, i in first.items() if live.carried}
    return {name: read[name] if name in read else _relative(name, read, len(positions)) for name in captured.parameters}


def _relative(name: str, read: Mapping[str, int], last: int) -> int:
    """Stage of the read parameter that shares the longest module path with ``name``, the last stage when none shares any."""
    best, stage = 0, last
    path = name.split(".")[:-1]
    for other, where in read.items():
        shared = 0
        for mine, theirs in zip(path, other.split(".")[:-1], strict=False):
            if mine != theirs:
                break
            shared += 1
        if shared > best:
            best, stage = shared, where
    return stage


def _stage(
    captured: Captured,
    live: Liveness,
    costs: NodeCosts,
    canonical: Mapping[str, str],
    number: int,
    group: list[int],
    begin: int,
    end: int,
    owned: tuple[str, ...],
) -> Stage:
    is_last = end == len(live.nodes)
    readers = [*group, len(live.nodes) - 1] if is_last else group
    again = recomputed_for(live, readers)
    run = sorted({*group, *again})
    sources = {source for i in (*run, *readers) for source in live.nodes[i].all_input_nodes}
    placeholders = [node for node in live.nodes if node.op == "placeholder"]
    # the recomputed nodes' backward is none: nothing that they depend on has a gradient
    parameters = dict.fromkeys(name for i in readers for name in parameters_of(captured, live.nodes[i], canonical))
    buffers = dict.fromkeys(name for i in run for name in info(live.nodes[i]).buffers)
    buffers.update(dict.fromkeys(name for s in live.nodes if s in sources and s.op == "get_attr" for name in info(s).buffers))
    return Stage(
        index=number,
        nodes=tuple(live.nodes[i].name for i in run),
        inputs=tuple(k for k, node in enumerate(placeholders) if node in sources),
        received=crossing(live, begin) if number else (),
        sent=() if is_last else crossing(live, end),
        parameters=tuple(parameters),
        buffers=tuple(buffers),
        owned=owned,
        forward_seconds=sum(costs.forward.get(live.nodes[i].name, 0.0) for i in run),
        backward_seconds=sum(costs.backward.get(live.nodes[i].name, 0.0) for i in group),
        parameter_bytes=sum(parameter_bytes(captured, name) for name in dict.fromkeys((*parameters, *owned))),
    )
