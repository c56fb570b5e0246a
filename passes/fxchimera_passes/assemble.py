"""Turn cut positions into stages: the nodes, inputs, boundary values, parameters and costs of each."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxchimera_passes.analytic import NodeCosts
from fxchimera_passes.atoms import Reads
from fxchimera_passes.captured import Captured, info
from fxchimera_passes.liveness import Liveness, crossing, crossing_nodes, recomputed_for
from fxchimera_passes.plan import Stage

__all__ = ["assemble", "owners"]


def assemble(
    captured: Captured,
    live: Liveness,
    costs: NodeCosts,
    positions: Sequence[int],
    owner: Mapping[str, int],
    reads: Reads | None = None,
) -> tuple[Stage, ...]:
    """Build the stages that begin at node 0 and at each of ``positions``; ``owner`` tells each parameter's stage."""
    ends = (*positions, len(live.nodes))
    owned: dict[int, list[str]] = {}
    for name in captured.parameters:
        owned.setdefault(owner[name], []).append(name)
    attributes, placeholders = (tuple(i for i, n in enumerate(live.nodes) if n.op == op) for op in ("get_attr", "placeholder"))
    tables = _Tables(captured, live, costs, reads or Reads.of(captured, live), attributes, placeholders)
    begins: tuple[int, ...] = (0, *positions)
    return tuple(_stage(tables, number, begins[number], end, tuple(owned.get(number, ()))) for number, end in enumerate(ends))


def owners(captured: Captured, live: Liveness, positions: Sequence[int], reads: Reads) -> dict[str, int]:
    """The stage that owns each parameter: the first that reads it.

    One that is never read joins its neighbour on another path, or else its nearest relative by name.
    """
    read = {name: bisect_right(positions, min(i, live.carried[-1])) for name, i in reads.first.items() if live.carried}
    read |= {name: read[neighbour] for name, neighbour in captured.beside.items() if neighbour in read and name not in read}
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


@dataclass(frozen=True, slots=True)
class _Tables:
    """What all stages of a cut are made from."""

    captured: Captured
    live: Liveness
    costs: NodeCosts
    reads: Reads
    attributes: tuple[int, ...]
    placeholders: tuple[int, ...]


def _stage(tables: _Tables, number: int, begin: int, end: int, owned: tuple[str, ...]) -> Stage:
    captured, live, costs = tables.captured, tables.live, tables.costs
    group = live.carried[bisect_left(live.carried, begin) : bisect_left(live.carried, end)]
    is_last = end == len(live.nodes)
    readers = (*group, len(live.nodes) - 1) if is_last else group
    again = recomputed_for(live, readers)
    run = sorted({*group, *again}) if again else group
    sources = {source for i in (*run, *readers) for source in live.inputs[i]}
    attributes = [info(live.nodes[i]) for i in tables.attributes if i in sources]
    # the recomputed nodes' backward is none: nothing that they depend on has a gradient
    parameters = dict.fromkeys(name for i in readers for name in tables.reads.by_node.get(i, ()))
    parameters.update(dict.fromkeys(name for name in owned if name in captured.beside))  # on another path it reads these
    buffers = dict.fromkeys(name for i in run for name in info(live.nodes[i]).buffers)
    buffers.update(dict.fromkeys(name for known in attributes for name in known.buffers))
    return Stage(
        index=number,
        nodes=tuple(live.nodes[i].name for i in run),
        inputs=tuple(k for k, i in enumerate(tables.placeholders) if i in sources),
        received=crossing(live, begin) if number else (),
        sent=() if is_last else crossing(live, end),
        parameters=tuple(parameters),
        buffers=tuple(buffers),
        owned=owned,
        forward_seconds=sum(costs.forward.get(live.nodes[i].name, 0.0) for i in run),
        backward_seconds=sum(costs.backward.get(live.nodes[i].name, 0.0) for i in group),
        parameter_bytes=sum(tables.reads.sizes[name] for name in dict.fromkeys((*parameters, *owned))),
        activation_bytes=_held_bytes(live, run, begin if number else 0, end),
    )


def _held_bytes(live: Liveness, run: Sequence[int], begin: int, end: int) -> int:
    """Bytes that a micro-batch holds in a stage from its forward to its backward, each piece of memory once."""
    held = {number: size for i in run for number, size in info(live.nodes[i]).saved}
    for i in live.inputs[-1] if end == len(live.nodes) else crossing_nodes(live, end):
        known = info(live.nodes[i])
        if known.value is not None and known.memory >= 0:
            held[known.memory] = max(held.get(known.memory, 0), known.value.bytes)
    for i in crossing_nodes(live, begin):  # received as a dense copy of its own
        known = info(live.nodes[i])
        held[known.memory] = known.value.bytes if known.value is not None else 0
    return sum(held.values())
