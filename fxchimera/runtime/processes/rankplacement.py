"""Which process runs which rank of which pipeline, given the nodes that the processes are on.

    compact          node 0: p0r0 p0r1 p0r2 p0r3      node 1: p1r0 p1r1 p1r2 p1r3
    mirrors_apart    node 0: p0r0 p0r1 p1r0 p1r1      node 1: p0r2 p0r3 p1r2 p1r3

Neighbouring ranks of a pipeline exchange activations all the time, so few pairs of neighbours should be on two nodes.  Ranks r and
D-1-r hold copies of each other's stages under a schedule of two directions; apart, a node that is lost takes no stage with it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

from fxchimera.errors import FxChimeraError

__all__ = ["RankPlacement", "rank_table"]

RankPlacement = Literal["compact", "mirrors_apart"]


def rank_table(
    width: int, depth: int, nodes: Sequence[Hashable], placement: RankPlacement = "compact"
) -> tuple[tuple[int, ...], ...]:
    """Return the process of every rank, by pipeline; process 0 is rank 0 of pipeline 0.

    "compact" fills node after node, which leaves the fewest pairs of neighbours on two nodes.  "mirrors_apart" fills nodes with the
    first halves of all pipelines, and then with the second halves, which leaves the fewest such pairs that its aim allows (for even
    D).  Both were compared with all other ways for small numbers.

    Args:
        width: Number of pipelines.
        depth: Number of ranks of a pipeline.
        nodes: The node of every process.
        placement: Which rule.

    Raises:
        FxChimeraError: The mirrors cannot be kept apart so.
    """
    places = {node: place for place, node in reversed(list(enumerate(nodes)))}  # where each node comes first
    order = sorted(range(width * depth), key=lambda process: places[nodes[process]])
    if placement == "compact":
        return tuple(tuple(order[w * depth : (w + 1) * depth]) for w in range(width))
    first, second = depth - depth // 2, depth // 2
    middle = width * first
    table = []
    for w in range(width):
        row = (*order[w * first : (w + 1) * first], *order[middle + w * second : middle + (w + 1) * second])
        _check_apart(w, row, nodes)
        table.append(row)
    return tuple(table)


def _check_apart(pipeline: int, row: Sequence[int], nodes: Sequence[Hashable]) -> None:
    for rank in range(len(row) // 2):
        process, mirror = row[rank], row[-1 - rank]
        if nodes[process] == nodes[mirror]:
            sizes = [list(nodes).count(node) for node in dict.fromkeys(nodes)]
            raise FxChimeraError(
                f"rank_placement='mirrors_apart': ranks {rank} and {len(row) - 1 - rank} of pipeline {pipeline} (processes "
                f"{process} and {mirror}) would both be on node {nodes[process]!r}; with nodes of {sizes} processes and "
                f"num_stages={len(row)} use 'compact', or start a multiple of {len(row) // 2} processes on each of several nodes"
            )
