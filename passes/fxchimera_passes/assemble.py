"""Turn cut positions into stages: the nodes, inputs, boundary values, parameters and costs of each."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from fxchimera_passes.analytic import NodeCosts
from fxchimera_passes.atoms import Reads
from fxchimera_passes.captured import Captured
from fxchimera_passes.liveness import Liveness, boundary, crossing_nodes, recomputed_for
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
    owned: dict[int, list[str]] = {}
    for name in captured.parameters:
        owned.setdefault(owner[name], []).append(name)
    tables = _Tables(captured, live, costs, reads or Reads.of(captured, live))
    crossed = ([], *(crossing_nodes(live, position) for position in positions), [])
    edges = pairwise((0, *positions, len(live.nodes)))
    return tuple(
        _stage(tables, _Span(number, *edge, crossed[number], crossed[number + 1]), tuple(owned.get(number, ())))
        for number, edge in enumerate(edges)
    )


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


@dataclass(frozen=True, slots=True)
class _Span:
    """Where a stage begins and ends, and the nodes whose values it receives and sends."""

    number: int
    begin: int
    end: int
    received: Sequence[int]
    sent: Sequence[int]


def _stage(tables: _Tables, span: _Span, owned: tuple[str, ...]) -> Stage:
    captured, live, costs = tables.captured, tables.live, tables.costs
    group = live.carried[bisect_left(live.carried, span.begin) : bisect_left(live.carried, span.end)]
    output = (len(live.nodes) - 1,) if span.end == len(live.nodes) else ()
    readers = (*group, *output)
    again = recomputed_for(live, readers)
    run = sorted({*group, *again}) if again else group
    sources = set(chain.from_iterable([live.inputs[i] for i in (*run, *output)]))
    attributes = [i for i in live.attributes if i in sources]
    by_node = tables.reads.by_node
    # the recomputed nodes' backward is none: nothing that they depend on has a gradient
    parameters = dict.fromkeys(chain.from_iterable([by_node[i] for i in readers if i in by_node]))
    parameters.update(dict.fromkeys(name for name in owned if name in captured.beside))  # on another path it reads these
    buffers = dict.fromkeys(chain.from_iterable([live.known[i].buffers for i in (*run, *attributes)]))
    names, later = [live.nodes[i].name for i in run], costs.deferrable
    return Stage(
        index=span.number,
        nodes=tuple(names),
        inputs=tuple(k for k, i in enumerate(live.placeholders) if i in sources),
        received=boundary(live, span.received),
        sent=boundary(live, span.sent),
        parameters=tuple(parameters),
        buffers=tuple(buffers),
        owned=owned,
        forward_seconds=sum([costs.forward.get(name, 0.0) for name in names]),
        backward_seconds=sum([costs.backward.get(live.nodes[i].name, 0.0) for i in group]),
        deferrable_seconds=None if later is None else sum([later.get(live.nodes[i].name, 0.0) for i in group]),
        parameter_bytes=sum([tables.reads.sizes[name] for name in dict.fromkeys((*parameters, *owned))]),
        activation_bytes=_held_bytes(live, run, span),
    )


def _held_bytes(live: Liveness, run: Sequence[int], span: _Span) -> int:
    """Bytes that a micro-batch holds in a stage from its forward to its backward, each piece of memory once."""
    held = dict(chain.from_iterable([live.known[i].saved for i in run]))
    for i in live.inputs[-1] if span.end == len(live.nodes) else span.sent:
        known = live.known[i]
        if known.value is not None and known.memory >= 0:
            held[known.memory] = max(held.get(known.memory, 0), known.value.bytes)
    for i in span.received:  # received as a dense copy of its own
        known = live.known[i]
        held[known.memory] = known.value.bytes if known.value is not None else 0
    return sum(held.values())
