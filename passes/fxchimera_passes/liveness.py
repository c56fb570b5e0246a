"""What crosses each possible cut of a recorded graph, and where a cut is possible at all.

    node        ids  mask  emb  block0  block1  head
    carried           .    o-----o-------o-------o      sent from stage to stage, a later reader's value through all between
    free         o                                      inputs, parameters, constants: given to every stage that reads them
    recomputed        o                                 depends on inputs and constants only and is cheap: run where it is read

Only tensors are sent, so a position where anything else is live cannot be cut, nor can the inside of a pinned range.  A position p
lies between node p-1 and node p.  One sweep, O(nodes + edges).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from fxchimera_passes.analytic import seconds_of
from fxchimera_passes.assumed import Check
from fxchimera_passes.captured import Captured, info
from fxchimera_passes.inplace import written
from fxchimera_passes.plan import BoundaryValue

__all__ = ["Liveness", "crossing", "crossing_nodes", "obstacle", "recomputed_for", "sweep"]

# A node is recomputed rather than sent only while it is a small part of the whole forward, and so are all of them together, for
# every stage may run them.  Analytic, never measured: every rank must come to the same answer.
_CHEAP_SHARE = 0.05
_CHEAP_TOTAL = 0.1
_OWN = frozenset({"parameter", "random"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """The sweep's result; indices are positions in graph order.

    ``carried`` are the nodes that run in exactly one stage, ``recomputed`` maps a node that runs in every stage that needs it to
    the recomputed nodes it needs.  ``inputs`` are the positions of what a node reads.  ``last_use`` of a carried node is its last
    reader, -1 without one.  ``sent_bytes[p]`` counts the values crossing p, ``crossing_bytes[p]`` twice those whose gradient
    comes back.  ``cuttable`` are the legal positions, ascending.
    """

    nodes: tuple[fx.Node, ...]
    index: Mapping[fx.Node, int]
    carried: tuple[int, ...]
    recomputed: Mapping[int, tuple[int, ...]]
    inputs: tuple[tuple[int, ...], ...]
    last_use: tuple[int, ...]
    sent_bytes: tuple[int, ...]
    crossing_bytes: tuple[int, ...]
    pinned: tuple[tuple[int, int], ...]
    cuttable: tuple[int, ...]


def sweep(captured: Captured) -> Liveness:
    """Find what every cut of ``captured`` would send (bytes) and which cuts are legal."""
    nodes = tuple(captured.graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    inputs = tuple(tuple(index[source] for source in node.all_input_nodes) for node in nodes)
    recomputed = _recomputed(captured, nodes, index)
    carried = tuple(i for i, n in enumerate(nodes) if n.op.startswith("call") and i not in recomputed)
    pinned = (*captured.pinned, *_written_buffers(nodes, carried))
    last_use = [-1] * len(nodes)
    for i, sources in enumerate(inputs):
        if i not in recomputed:
            for source in sources:
                last_use[source] = i
    blocked = _covered(len(nodes), _blocks(nodes, carried, last_use, pinned))
    values = [(i, value) for i in carried if last_use[i] > i and (value := info(nodes[i]).value) is not None]
    sent = [(i + 1, last_use[i], value.bytes) for i, value in values]
    returned = [span for span, (_, value) in zip(sent, values, strict=True) if value.requires_grad]
    return Liveness(
        nodes=nodes,
        index=index,
        carried=carried,
        recomputed=recomputed,
        inputs=inputs,
        last_use=tuple(last_use),
        sent_bytes=_covered(len(nodes), sent),
        crossing_bytes=_covered(len(nodes), (*sent, *returned)),
        pinned=pinned,
        cuttable=tuple(i for i in carried[1:] if not blocked[i]),
    )


def crossing(live: Liveness, position: int) -> tuple[BoundaryValue, ...]:
    """The tensors that a cut at ``position`` sends, in graph order."""
    found = ((live.nodes[i].name, info(live.nodes[i]).value) for i in crossing_nodes(live, position))
    return tuple(BoundaryValue(name, value) for name, value in found if value is not None)


def crossing_nodes(live: Liveness, position: int) -> list[int]:
    """The carried nodes before ``position`` whose values are read at or after it."""
    last_use = live.last_use
    return [i for i in live.carried[: bisect_left(live.carried, position)] if last_use[i] >= position]


def obstacle(live: Liveness, position: int) -> str:
    """Say in words why ``position`` cannot be cut."""
    for i in live.carried:
        if i < position <= live.last_use[i] and info(live.nodes[i]).value is None:
            node = live.nodes[i]
            return f"the value of {node.name!r}, which is not a tensor, is needed on both sides {info(node).line}".rstrip()
    for low, high in live.pinned:
        if low < position <= high:
            return f"{live.nodes[low].name!r} to {live.nodes[high].name!r} share memory or state and must stay together"
    return "nothing that runs once begins there"


def recomputed_for(live: Liveness, readers: Iterable[int]) -> set[int]:
    """All recomputed nodes that the nodes ``readers`` need, directly or through other recomputed nodes."""
    found: set[int] = set()
    if not live.recomputed:
        return set()
    todo = [source for reader in readers for source in live.inputs[reader] if source in live.recomputed]
    while todo:
        i = todo.pop()
        if i in live.recomputed and i not in found:
            found.add(i)
            todo.extend(live.recomputed[i])
    return found


def _covered(n: int, ranges: Iterable[tuple[int, int, int]]) -> tuple[int, ...]:
    """Sum of the weights of the ranges (first, last inclusive, weight) that cover each position 0..n."""
    change = [0] * (n + 2)
    for first, last, weight in ranges:
        change[first] += weight
        change[last + 1] -= weight
    return tuple(accumulate(change[: n + 1]))


def _blocks(
    nodes: tuple[fx.Node, ...], carried: tuple[int, ...], last_use: list[int], pinned: Iterable[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    found = [(low + 1, high, 1) for low, high in pinned if high > low]
    found += [(i + 1, last_use[i], 1) for i in carried if last_use[i] > i and info(nodes[i]).value is None]
    return found


def _written_buffers(nodes: tuple[fx.Node, ...], carried: tuple[int, ...]) -> list[tuple[int, int]]:
    """Ranges between the first and last node that touch a buffer which the forward writes: its state lives in one stage."""
    touched: dict[str, list[int]] = {}
    dirty = {name for i in carried for name in info(nodes[i]).writes}
    for i in carried if dirty else ():
        for name in {*info(nodes[i]).writes, *_buffers_read(nodes[i])} & dirty:
            touched.setdefault(name, []).append(i)
    return [(where[0], where[-1]) for where in touched.values() if len(where) > 1]


def _buffers_read(node: fx.Node) -> set[str]:
    return {
        *info(node).buffers,
        *(name for source in node.all_input_nodes if source.op == "get_attr" for name in info(source).buffers),
    }


def _recomputed(captured: Captured, nodes: tuple[fx.Node, ...], index: Mapping[fx.Node, int]) -> dict[int, tuple[int, ...]]:
    """Nodes to run wherever they are read, each with the recomputed nodes it needs.

    A pinned range in which something is written in place is recomputed as a whole or not at all: a reader's graph edges alone
    would miss a write through another view of the same memory.
    """
    calls = [(i, info(node)) for i, node in enumerate(nodes) if node.op.startswith("call")]
    writers = [i for i, known in calls if known.mutates]
    ranges = [range(low, high + 1) for low, high in captured.pinned if any(low <= w <= high for w in writers)]
    dirty = {name for _, known in calls for name in known.writes}
    seconds = {i: seconds_of(known.forward_flops, known.moved_bytes) for i, known in calls}
    whole = sum(seconds.values())
    limit = _CHEAP_SHARE * whole
    hopeful = [i for i, known in calls if _OWN.isdisjoint(known.depends)]
    banned: set[int] = set()
    while True:
        chosen: set[int] = set()
        for i in hopeful:
            if i not in banned and seconds[i] <= limit and _recomputable(nodes[i], index, chosen, dirty, captured):
                chosen.add(i)
        if sum(seconds[i] for i in chosen) > _CHEAP_TOTAL * whole:
            limit /= 2
            continue
        torn = {i for span in ranges if not _whole(span, nodes, chosen) for i in span if i in chosen}
        if not torn:
            break
        banned |= torn
    needs = {i: {index[s] for s in nodes[i].all_input_nodes} & chosen for i in chosen}
    for span in ranges:
        members = chosen.intersection(span)
        for i in members:
            needs[i] |= members - {i}
    return {i: tuple(sorted(needs[i])) for i in sorted(chosen)}


def _whole(span: range, nodes: tuple[fx.Node, ...], chosen: set[int]) -> bool:
    return all(i in chosen for i in span if nodes[i].op.startswith("call"))


def _recomputable(node: fx.Node, index: Mapping[fx.Node, int], chosen: set[int], dirty: set[str], captured: Captured) -> bool:
    known = info(node)
    if known.random or known.writes or known.parameters or isinstance(node.target, Check):
        return False  # a check of an answer has no reader that could ask for it
    if node.op == "call_module" and any(_within(path, str(node.target)) for path in captured.report.stateful):
        return False  # what it counts, it would count once in each stage
    if dirty & _buffers_read(node):
        return False
    if any(not source.op.startswith("call") for source in written(node)):
        return False
    return all(
        not source.op.startswith("call") or index[source] in chosen or _shape_only(source, node) for source in node.all_input_nodes
    )


def _within(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")


def _shape_only(source: fx.Node, reader: fx.Node) -> bool:
    """Whether ``reader`` takes shape and dtype but no number from ``source``: the recording would else say so in ``depends``.

    transformers' rotary embeddings take the hidden states for their dtype alone.
    """
    return info(source).value is not None and bool(info(source).depends & _OWN) and not info(reader).depends & _OWN
