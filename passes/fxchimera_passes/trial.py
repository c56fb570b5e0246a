"""What the stages of a cut would cost, read off sums that are made once, so that many cuts can be tried.

    node           0   1   2   3   4   5
    sum before     0   3   4   9  11  12  14          stage 1..3 costs 11 - 3

A search tries some hundred cuts of a graph of perhaps 100,000 nodes; to assemble the stages of each would take a minute.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from fxchimera_passes.analytic import NodeCosts
from fxchimera_passes.coarse import Division
from fxchimera_passes.liveness import Liveness, recomputed_for
from fxchimera_passes.plan import Load

__all__ = ["Trial"]


@dataclass(frozen=True, slots=True)
class Trial:
    """Sums up to each possible cut, in the order of the atoms (one more entry for the end).

    ``sent`` is no sum but the bytes that a cut sends, ``held`` counts what a stage must hold at least one of.  ``again`` has the
    recomputed nodes that cost something: the forward seconds of one, and the atoms that need it, ascending.  ``empty`` stages that
    compute nothing come first.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    sent: tuple[int, ...]
    held: tuple[int, ...]
    again: tuple[tuple[float, tuple[int, ...]], ...]
    empty: int
    deferrable: tuple[float, ...] | None = None

    @classmethod
    def of(cls, live: Liveness, costs: NodeCosts, starts: Sequence[int], division: Division) -> Trial:
        """Sum up the costs of the nodes of ``live``, for cuts before the nodes ``starts``."""
        return cls(
            _sums(live, costs.forward, starts),
            _sums(live, costs.backward, starts),
            (*[live.sent_bytes[p] for p in starts], 0),
            tuple(accumulate(division.counts, initial=0)),
            _again(live, costs, starts),
            division.empty,
            None if costs.deferrable is None else _sums(live, costs.deferrable, starts),
        )

    def legal(self, cuts: Sequence[int]) -> bool:
        """Whether every stage of a cut that is to compute holds what it must."""
        end = len(self.held) - 1
        edges = (0, *cuts, end)
        return all(0 <= a < b <= end and self.held[a] < self.held[b] for a, b in pairwise(edges))

    def pair_seconds(self, cuts: Sequence[int]) -> float:
        """Heaviest sum of the stages s and D-1-s, which share a rank in two directions; the heaviest stage breaks ties."""
        seconds = [load.cost_seconds for load in self.loads(cuts)]
        return max(map(sum, zip(seconds, reversed(seconds), strict=True))) + 1e-3 * max(seconds)

    def loads(self, cuts: Sequence[int]) -> tuple[Load, ...]:
        """The stages of a cut before each atom of ``cuts``."""
        found = [Load(0.0, 0.0, 0)] * self.empty
        for begin, end in pairwise((0, *cuts, len(self.forward) - 1)):
            more = sum(seconds for seconds, readers in self.again if bisect_left(readers, begin) < bisect_left(readers, end))
            forward, backward = self.forward[end] - self.forward[begin], self.backward[end] - self.backward[begin]
            later = None if self.deferrable is None else self.deferrable[end] - self.deferrable[begin]
            found.append(Load(forward + more, backward, self.sent[end], deferrable_seconds=later))
        return tuple(found)


def _sums(live: Liveness, seconds: Mapping[str, float], starts: Sequence[int]) -> tuple[float, ...]:
    """Seconds of the carried nodes before each of ``starts``, and of all."""
    table = np.zeros(len(live.nodes) + 1)
    table[[i + 1 for i in live.carried]] = [seconds.get(live.nodes[i].name, 0.0) for i in live.carried]
    return tuple(np.cumsum(table)[[*starts, len(live.nodes)]].tolist())


def _again(live: Liveness, costs: NodeCosts, starts: Sequence[int]) -> tuple[tuple[float, tuple[int, ...]], ...]:
    readers: dict[int, list[int]] = {}
    needed: dict[int, set[int]] = {}
    for atom, (begin, end) in enumerate(pairwise((*starts, len(live.nodes)))) if live.recomputed else ():
        for i in range(begin, end):
            if i in live.recomputed:
                continue
            for source in live.inputs[i]:
                if source not in live.recomputed:
                    continue
                if source not in needed:
                    needed[source] = {source} | recomputed_for(live, [source])
                for other in needed[source]:
                    readers.setdefault(other, []).append(atom)
    found = ((costs.forward.get(live.nodes[i].name, 0.0), tuple(atoms)) for i, atoms in sorted(readers.items()))
    return tuple((seconds, atoms) for seconds, atoms in found if seconds > 0.0)
