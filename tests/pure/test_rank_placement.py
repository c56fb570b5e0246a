"""Which process runs which rank, against all ways to give the ranks to the nodes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest

from fxchimera import FxChimeraError
from fxchimera.runtime.processes.layout import Layout
from fxchimera.runtime.processes.rankplacement import rank_table

Nodes = Sequence[int]

# pipelines, ranks of a pipeline, processes of a node
CELLS = [
    (w, d, n)
    for w, d, n in itertools.product((1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 6, 8), (1, 2, 3, 4, 5, 6))
    if w * d % n == 0 and math.factorial(w * d) // math.factorial(n) ** (w * d // n) <= 6000
]


def crossings(table: Sequence[Nodes]) -> int:
    """Pairs of neighbouring ranks on two nodes, given each rank's node."""
    return sum(a != b for row in table for a, b in itertools.pairwise(row))


def is_apart(table: Sequence[Nodes]) -> bool:
    return all(row[rank] != row[-1 - rank] for row in table for rank in range(len(row) // 2))


def arrangements(left: list[int], count: int) -> Iterator[tuple[int, ...]]:
    """All ways to give ``count`` ranks to nodes that have room for so many."""
    if not count:
        yield ()
        return
    for node, room in enumerate(left):
        if room:
            left[node] -= 1
            for rest in arrangements(left, count - 1):
                yield (node, *rest)
            left[node] += 1


def best(width: int, depth: int, size: int, *, apart: bool) -> int | None:
    """The fewest crossings of any arrangement, None if there is none with mirrors apart."""
    found = []
    for flat in arrangements([size] * (width * depth // size), width * depth):
        table = [flat[w * depth : (w + 1) * depth] for w in range(width)]
        if not apart or is_apart(table):
            found.append(crossings(table))
    return min(found, default=None)


def nodes_of(table: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    return [[process // size for process in row] for row in table]


@pytest.mark.parametrize(("width", "depth", "size"), CELLS)
def test_compact_has_the_fewest_neighbours_on_two_nodes(width: int, depth: int, size: int) -> None:
    nodes = [process // size for process in range(width * depth)]
    table = rank_table(width, depth, nodes)
    assert sorted(itertools.chain(*table)) == list(range(width * depth))
    assert table[0][0] == 0
    assert crossings(nodes_of(table, size)) == best(width, depth, size, apart=False)


@pytest.mark.parametrize(("width", "depth", "size"), CELLS)
def test_mirrors_apart_has_the_fewest_that_this_allows(width: int, depth: int, size: int) -> None:
    nodes = [process // size for process in range(width * depth)]
    try:
        table = rank_table(width, depth, nodes, "mirrors_apart")
    except FxChimeraError:
        table = None
    least = best(width, depth, size, apart=True)
    if table is not None:
        assert sorted(itertools.chain(*table)) == list(range(width * depth))
        assert table[0][0] == 0
        assert is_apart(nodes_of(table, size))
        if depth % 2 == 0:
            assert crossings(nodes_of(table, size)) == least
    elif depth % 2 == 0 and size % (depth // 2) == 0:  # else halves that fill nodes one after the other may not do
        assert least is None, "only what cannot be is refused"


@pytest.mark.parametrize("placement", ["compact", "mirrors_apart"])
def test_processes_that_lie_crosswise_on_the_nodes_are_sorted_first(placement: str) -> None:
    """As SLURM's cyclic distribution has them."""
    nodes = ["a", "b", "a", "b", "a", "b", "a", "b"]
    found = [[nodes[process] for process in row] for row in rank_table(2, 4, nodes, placement)]
    assert found == ([list("aaaa"), list("bbbb")] if placement == "compact" else [list("aabb"), list("aabb")])


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(FxChimeraError, match=r"ranks 0 and 3 of pipeline 0 \(processes 0 and 3\) would both be on node 0"):
        rank_table(1, 4, [0, 0, 0, 0], "mirrors_apart")
    with pytest.raises(FxChimeraError, match="'compact' or 'mirrors_apart'"):
        Layout.of(4, None, "scattered")  # type: ignore[arg-type]
