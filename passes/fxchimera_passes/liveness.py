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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import fx

from fxchimera_passes.analytic import seconds_of
from fxchimera_passes.assumed import Check
from fxchimera_passes.captured import Captured, NodeInfo, info
from fxchimera_passes.inplace import written
from fxchimera_passes.plan import BoundaryValue

__all__ = [
    "Liveness", "boundary", "buffers_read", "crossing", "crossing_nodes", "obstacle", "recomputed_for", "sweep", "within",
]  # fmt: skip

# A node is recomputed rather than sent only while it is a small part of the whole forward, and so are all of them together, for
# every stage may run them.  Analytic, never measured: every rank must come to the same answer.
_CHEAP_SHARE = 0.05
_CHEAP_TOTAL = 0.1
_OWN = frozenset({"parameter", "random"})
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """The sweep's result; indices are positions in graph order.

    ``known`` is what the recording knows of each node, ``inputs`` are the positions of what it reads.  ``placeholders`` and
    ``attributes`` are given to every stage that reads them, ``carried`` run in exactly one stage, and ``recomputed`` maps a node
    that runs in every stage that needs it to the recomputed nodes it needs.  ``last_use`` of a carried node is its last reader, -1
    without one.  ``sent_bytes[p]`` counts the values crossing p, ``crossing_bytes[p]`` twice those whose gradient comes back.
    ``cuttable`` are the legal positions, ascending.
    """

    nodes: tuple[fx.Node, ...]
    known: tuple[NodeInfo, ...]
    inputs: tuple[tuple[int, ...], ...]
    placeholders: tuple[int, ...]
    attributes: tuple[int, ...]
    carried: tuple[int, ...]
    recomputed: Mapping[int, tuple[int, ...]]
    last_use: tuple[int, ...]
    sent_bytes: tuple[int, ...]
    crossing_bytes: tuple[int, ...]
    pinned: tuple[tuple[int, int], ...]
    cuttable: tuple[int, ...]


def sweep(captured: Captured) -> Liveness:
    """Find what every cut of ``captured`` would send (bytes) and which cuts are legal."""
    nodes = tuple(captured.graph.nodes)
    known = tuple(map(info, nodes))
    position = {node: i for i, node in enumerate(nodes)}.__getitem__
    inputs = tuple([tuple(map(position, node.all_input_nodes)) for node in nodes])
    ops = [node.op for node in nodes]
    calls = [i for i, op in enumerate(ops) if op.startswith("call")]
    dirty = {name for i in calls for name in known[i].writes}
    recomputed = _recomputed(captured, nodes, known, inputs, calls, dirty)
    carried = tuple([i for i in calls if i not in recomputed])
    pinned = (*captured.pinned, *(_written_buffers(nodes, carried, dirty) if dirty else ()))
    last_use = [-1] * len(nodes)
    for i, sources in enumerate(inputs):
        if i not in recomputed:
            for source in sources:
                last_use[source] = i
    sent, returned, blocked = _spanned(known, carried, last_use, pinned)
    return Liveness(
        nodes=nodes,
        known=known,
        inputs=inputs,
        placeholders=tuple([i for i, op in enumerate(ops) if op == "placeholder"]),
        attributes=tuple([i for i, op in enumerate(ops) if op == "get_attr"]),
        carried=carried,
        recomputed=recomputed,
        last_use=tuple(last_use),
        sent_bytes=tuple(sent.tolist()),
        crossing_bytes=tuple((sent + returned).tolist()),
        pinned=pinned,
        cuttable=tuple([i for i, barred in zip(carried[1:], blocked[[*carried[1:]]].tolist(), strict=True) if not barred]),
    )


def crossing(live: Liveness, position: int) -> tuple[BoundaryValue, ...]:
    """The tensors that a cut at ``position`` sends, in graph order."""
    return boundary(live, crossing_nodes(live, position))


def boundary(live: Liveness, crossed: Iterable[int]) -> tuple[BoundaryValue, ...]:
    """The tensors among the values of the nodes ``crossed``."""
    found = ((live.nodes[i].name, live.known[i].value) for i in crossed)
    return tuple(BoundaryValue(name, value) for name, value in found if value is not None)


def crossing_nodes(live: Liveness, position: int) -> list[int]:
    """The carried nodes before ``position`` whose values are read at or after it."""
    last_use = live.last_use
    return [i for i in live.carried[: bisect_left(live.carried, position)] if last_use[i] >= position]


def obstacle(live: Liveness, position: int) -> str:
    """Say in words why ``position`` cannot be cut."""
    for i in crossing_nodes(live, position):
        if live.known[i].value is None:
            name, line = live.nodes[i].name, live.known[i].line
            return f"the value of {name!r}, which is not a tensor, is needed on both sides {line}".rstrip()
    for low, high in live.pinned:
        if low < position <= high:
            return f"{live.nodes[low].name!r} to {live.nodes[high].name!r} share memory or state and must stay together"
    return "nothing that runs once begins there"


def recomputed_for(live: Liveness, readers: Iterable[int]) -> set[int]:
    """All recomputed nodes that the nodes ``readers`` need, directly or through other recomputed nodes."""
    found: set[int] = set()
    if not live.recomputed:
        return found
    todo = [source for reader in readers for source in live.inputs[reader] if source in live.recomputed]
    while todo:
        i = todo.pop()
        if i not in found:
            found.add(i)
            todo.extend(live.recomputed[i])
    return found


def _spanned(
    known: Sequence[NodeInfo], carried: Sequence[int], last_use: Sequence[int], pinned: Sequence[tuple[int, int]]
) -> tuple[_Ints, _Ints, _Ints]:
    """By position: the bytes sent there, those of them whose gradient comes back, and how many reasons forbid a cut."""
    first = np.array(carried, np.int64)
    last = np.array(last_use, np.int64)[first]
    values = [known[i].value for i in carried]
    sent = np.array([0 if value is None else value.bytes for value in values], np.int64)
    returned = np.where([value is not None and value.requires_grad for value in values], sent, 0)
    objects = np.array([value is None for value in values], np.int64)
    ranges = np.array(pinned, np.int64).reshape(-1, 2)
    return (
        _covered(len(known), first, last, sent),
        _covered(len(known), first, last, returned),
        _covered(len(known), first, last, objects) + _covered(len(known), ranges[:, 0], ranges[:, 1], 1),
    )


def _covered(n: int, first: _Ints, last: _Ints, weights: Any) -> _Ints:
    """Sum of the weights of the ranges, from after ``first`` to ``last``, that cover each position 0..n; others are empty."""
    change = np.zeros(n + 2, np.int64)
    np.add.at(change, first + 1, weights)
    np.subtract.at(change, np.maximum(last, first) + 1, weights)
    return np.cumsum(change[: n + 1])


def _written_buffers(nodes: Sequence[fx.Node], carried: Iterable[int], dirty: set[str]) -> list[tuple[int, int]]:
    """Ranges between the first and last node that touch one of the buffers ``dirty``: state that is written lives in one stage."""
    touched: dict[str, list[int]] = {}
    for i in carried:
        for name in {*info(nodes[i]).writes, *buffers_read(nodes[i])} & dirty:
            touched.setdefault(name, []).append(i)
    return [(where[0], where[-1]) for where in touched.values() if len(where) > 1]


def buffers_read(node: fx.Node) -> set[str]:
    """The buffers that a node reads, inside a leaf module or as a direct argument."""
    return {
        *info(node).buffers,
        *(name for source in node.all_input_nodes if source.op == "get_attr" for name in info(source).buffers),
    }


def _recomputed(
    captured: Captured,
    nodes: Sequence[fx.Node],
    known: Sequence[NodeInfo],
    inputs: Sequence[tuple[int, ...]],
    calls: Sequence[int],
    dirty: set[str],
) -> dict[int, tuple[int, ...]]:
    """Nodes to run wherever they are read, each with the recomputed nodes it needs.

    A pinned range in which something is written in place is recomputed as a whole or not at all: a reader's graph edges alone
    would miss a write through another view of the same memory.
    """
    hopeful = [i for i in calls if _OWN.isdisjoint(known[i].depends) and _repeatable(nodes[i], dirty, captured)]
    if not hopeful:
        return {}
    writers = [i for i in calls if known[i].mutates]
    ranges = [range(low, high + 1) for low, high in captured.pinned if any(low <= w <= high for w in writers)]
    seconds = {i: seconds_of(known[i].forward_flops, known[i].moved_bytes) for i in calls}
    whole = sum(seconds.values())
    limit = _CHEAP_SHARE * whole
    banned: set[int] = set()
    while True:
        chosen: set[int] = set()
        for i in hopeful:
            if i not in banned and seconds[i] <= limit and _supplied(i, nodes, inputs[i], chosen):
                chosen.add(i)
        if sum(seconds[i] for i in chosen) > _CHEAP_TOTAL * whole:
            limit /= 2
            continue
        torn = {i for span in ranges if not _whole(span, nodes, chosen) for i in span if i in chosen}
        if not torn:
            break
        banned |= torn
    needs = {i: chosen.intersection(inputs[i]) for i in chosen}
    for span in ranges:
        members = chosen.intersection(span)
        for i in members:
            needs[i] |= members - {i}
    return {i: tuple(sorted(needs[i])) for i in sorted(chosen)}


def _whole(span: range, nodes: Sequence[fx.Node], chosen: set[int]) -> bool:
    return all(i in chosen for i in span if nodes[i].op.startswith("call"))


def _repeatable(node: fx.Node, dirty: set[str], captured: Captured) -> bool:
    """Whether several stages may run ``node`` without a trace of it."""
    known = info(node)
    if known.random or known.writes or known.parameters or isinstance(node.target, Check):
        return False  # a check of an answer has no reader that could ask for it
    if node.op == "call_module" and any(within(path, str(node.target)) for path in captured.report.stateful):
        return False  # what it counts, it would count once in each stage
    if dirty and dirty & buffers_read(node):
        return False
    return all(source.op.startswith("call") for source in written(node))


def _supplied(reader: int, nodes: Sequence[fx.Node], sources: Iterable[int], chosen: set[int]) -> bool:
    """Whether every stage has, or can recompute, what ``reader`` reads."""
    return all(i in chosen or not nodes[i].op.startswith("call") or _shape_only(nodes[i], nodes[reader]) for i in sources)


def within(path: str, module: str) -> bool:
    """Whether the module ``path`` is ``module`` or inside it."""
    return path == module or path.startswith(f"{module}.")


def _shape_only(source: fx.Node, reader: fx.Node) -> bool:
    """Whether ``reader`` takes shape and dtype but no number from ``source``: the recording would else say so in ``depends``.

    transformers' rotary embeddings take the hidden states for their dtype alone.
    """
    return info(source).value is not None and bool(info(source).depends & _OWN) and not info(reader).depends & _OWN
