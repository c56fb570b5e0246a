"""What crosses each possible cut of a recorded graph, and where a cut is possible at all.

    node        ids  mask  emb  block0  block1  head
    carried           .    o-----o-------o-------o      sent from stage to stage, a later reader's value through all between
    free         o                                      inputs, parameters, constants: given to every stage that reads them
    recomputed        o                                 depends on inputs and constants only and is cheap: run where it is read

Only tensors are sent, so a position where anything else is live cannot be cut, nor can the inside of a pinned range.  A position p
lies between node p-1 and node p.  One sweep, O(nodes + edges).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from fxchimera_passes.captured import Captured, info
from fxchimera_passes.inplace import written
from fxchimera_passes.plan import BoundaryValue

__all__ = ["Liveness", "crossing", "obstacle", "recomputed_for", "sweep"]

# A node is recomputed rather than sent only while it is a small part of the whole forward.  Analytic, never measured: every rank
# must come to the same answer.
_CHEAP_SHARE = 0.02
_OWN = frozenset({"parameter", "random"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """The sweep's result; indices are positions in graph order.

    ``carried`` are the nodes that run in exactly one stage, ``recomputed`` maps a node that runs in every stage that needs it to
    the recomputed nodes it needs.  ``last_use`` of a carried node is its last reader, -1 without one.  ``crossing_bytes[p]`` counts
    values crossing p, twice when their gradient comes back.  ``cuttable`` are the legal positions, ascending.
    """

    nodes: tuple[fx.Node, ...]
    index: Mapping[fx.Node, int]
    carried: tuple[int, ...]
    recomputed: Mapping[int, tuple[int, ...]]
    last_use: tuple[int, ...]
    crossing_bytes: tuple[int, ...]
    pinned: tuple[tuple[int, int], ...]
    cuttable: tuple[int, ...]


def sweep(captured: Captured) -> Liveness:
    """Find what every cut of ``captured`` would send (bytes) and which cuts are legal."""
    nodes = tuple(captured.graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    recomputed = _recomputed(captured, nodes, index)
    carried = tuple(i for i, n in enumerate(nodes) if n.op.startswith("call") and i not in recomputed)
    pinned = (*captured.pinned, *_written_buffers(nodes, carried))
    last_use = [-1] * len(nodes)
    for i, node in enumerate(nodes):
        if i not in recomputed:
            for source in node.all_input_nodes:
                last_use[index[source]] = i
    blocked = _covered(len(nodes), _blocks(nodes, carried, last_use, pinned))
    weights = [(i + 1, last_use[i], _wire_bytes(nodes[i])) for i in carried if last_use[i] > i]
    return Liveness(
        nodes=nodes,
        index=index,
        carried=carried,
        recomputed=recomputed,
        last_use=tuple(last_use),
        crossing_bytes=_covered(len(nodes), weights),
        pinned=pinned,
        cuttable=tuple(i for i in carried[1:] if not blocked[i]),
    )


def crossing(live: Liveness, position: int) -> tuple[BoundaryValue, ...]:
    """The tensors that a cut at ``position`` sends, in graph order."""
    found = []
    for i in live.carried:
        if i >= position:
            break
        value = info(live.nodes[i]).value
        if live.last_use[i] >= position and value is not None:
            found.append(BoundaryValue(live.nodes[i].name, value))
    return tuple(found)


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
    todo = [live.index[source] for reader in readers for source in live.nodes[reader].all_input_nodes]
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


def _wire_bytes(node: fx.Node) -> int:
    value = info(node).value
    return 0 if value is None else value.bytes * (2 if value.requires_grad else 1)


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
    for i in carried:
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
    writers = {i for i, node in enumerate(nodes) if written(node)}
    ranges = [range(low, high + 1) for low, high in captured.pinned if any(low <= w <= high for w in writers)]
    calls = [info(node) for node in nodes if node.op.startswith("call")]
    dirty = {name for known in calls for name in known.writes}
    limit = _CHEAP_SHARE * sum(known.forward_flops for known in calls)
    banned: set[int] = set()
    while True:
        chosen: set[int] = set()
        for i, node in enumerate(nodes):
            if i not in banned and _recomputable(node, index, chosen, limit, dirty, captured):
                chosen.add(i)
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


def _recomputable(
    node: fx.Node, index: Mapping[fx.Node, int], chosen: set[int], limit: float, dirty: set[str], captured: Captured
) -> bool:
    if not node.op.startswith("call"):
        return False
    known = info(node)
    if known.depends & _OWN or known.random or known.writes or known.parameters:
        return False
    if node.op == "call_module" and any(_within(path, str(node.target)) for path in captured.report.stateful):
        return False  # what it counts, it would count once in each stage
    if known.forward_flops > limit or dirty & _buffers_read(node):
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
