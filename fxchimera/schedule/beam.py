"""Beam search over partial orders, from the first operation on: what list rules decide once, this decides several ways at a time.

    layer k     the most promising partial orders with k operations (a whole backward counts as two)
    expand      the operation that can end first, and every other one on its rank that could start before that end; once more
                without forwards, which leaves their memory to others (Giffler and Thompson 1960, with refusals)
    promise     a lower bound on the makespan of everything that begins like this, and the sum of the ranks' bounds
    keep        the most promising ones, but only so many that hold the same memory: the others are as good later

Micro-batches of a pipe are alike, so each stage takes them in turn and a partial order is told by counts and times; those with the
same counts and free times are one.  Where little memory leaves good orders far from each other, as annealing sees them, this
finds in a tenth of a second what annealing does not find at all.

Times are integers, so that equal ones are equal.  The budget counts partial orders, not seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fxchimera.schedule.partial import B, Classes, F, Node, W, X
from fxchimera.schedule.problem import Plan, Problem

__all__ = ["beam"]

_CHILD = 28  # what a partial order costs, in operations that the annealing looks at
_NARROW = 12  # partial orders of a layer, below which a list rule is as good
# Whether the sum of the ranks' bounds comes before the worst of them; whether partial orders are of one sort if their ranks hold
# the same memory, else if they have done the same forwards; the share of a layer that one sort may fill.
_WAYS = ((False, True, 0.1), (False, False, 0.01), (True, True, 0.1), (False, True, 0.03), (True, False, 0.05))


def beam(problem: Problem, budget: int, *, limit: float = math.inf, way: int = 0) -> tuple[Plan | None, int]:
    """The best order found within a budget in the units of :class:`Annealing`, and what was used of it.

    None if no order below ``limit`` seconds is found, and at no cost if the budget is too small for a beam that is wide enough.
    The way, 0 to 4, chooses how partial orders are judged and which of them count as of one sort.
    """
    if budget < 2 * _CHILD * _NARROW * 3 * problem.num_cells:
        return None, 0
    run = _Beam(problem, budget, limit, way)
    return run.go(), run.used


class _Beam(Classes):
    """State of one beam search."""

    def __init__(self, problem: Problem, budget: int, limit: float, way: int) -> None:
        super().__init__(problem)
        self.budget, self.used = budget, 0
        self.even, self.by_memory, self.share = _WAYS[way]
        self.limit = limit * self.scale - 1 if limit < math.inf else math.inf

    def go(self) -> Plan | None:
        """Layer by layer; the width follows from what is left of the budget."""
        count, steps = len(self.rank), 3 * sum(self.total)
        work = [sum(self.total[one] * (self.seconds[F][one] + self.least[one]) for one in mine) for mine in self.mine]
        nothing: list[tuple[int, ...]] = [()] * (3 * count)
        root = Node((0, 0, 0), [0] * len(work), [0.0] * len(work), work, [0] * (3 * count), nothing, None, (F, 0))
        layers: list[dict[tuple[int, ...], Node]] = [{(): root}, {}, {}]
        nodes, each = 1, 2.0 * _CHILD
        for step in range(steps):
            found = layers.pop(0)
            layers.append({})
            width = max(2, int((self.budget - self.used) / (each * (steps - step))))
            for node in self.kept(found.values(), width):
                nodes += 1
                for end, _, kind, one in self.choices(node):
                    self.expand(node, end, kind, one, layers[1 if kind == B else 0])
            each = max(_CHILD, self.used / nodes)
        last = min(layers[0].values(), key=lambda node: max(node.free), default=None)
        return None if last is None else self.plan(last)

    def kept(self, nodes: Iterable[Node], width: int) -> list[Node]:
        """The best of a layer, of no sort more than its share while there are others."""
        most, third = max(1, int(self.share * width)), len(self.rank)
        seen: dict[tuple[float, ...], int] = {}
        kept: list[Node] = []
        rest: list[Node] = []
        for node in sorted(nodes, key=lambda node: node.bounds):
            sort = tuple(node.held if self.by_memory else node.done[:third])
            seen[sort] = seen.get(sort, 0) + 1
            (kept if seen[sort] <= most else rest).append(node)
            if len(kept) == width:
                return kept
        return kept + rest[: width - len(kept)]

    def ready(self, node: Node) -> list[tuple[int, int, int, int]]:
        """The operations that can come next, as (end, start, kind, class), the earliest end first."""
        count, free, held, done, coming = len(self.rank), node.free, node.held, node.done, node.coming
        rank, seconds, found = self.rank, self.seconds, []
        for one in self.classes:
            here = rank[one]
            now = free[here]
            if done[one] < self.total[one] and held[here] + self.hold[one] <= self.caps[here] and (self.first[one] or coming[one]):
                start = now if self.first[one] else max(now, coming[one][0])
                if self.safe(node, one):
                    found.append((start + seconds[F][one], start, F, one))
            if wait := coming[count + one]:
                start = max(now, wait[0])
                found.extend((start + seconds[kind][one], start, kind, one) for kind in self.kinds)
            if wait := coming[2 * count + one]:
                start = max(now, wait[0])
                found.append((start + seconds[W][one], start, W, one))
        found.sort()
        return found

    def choices(self, node: Node) -> list[tuple[int, int, int, int]]:
        """Of those, the ones to try."""
        left = self.ready(node)
        chosen: list[tuple[int, int, int, int]] = []
        while left:
            end, _, kind, one = left[0]
            here = self.rank[one]
            rivals = [other for other in left if self.rank[other[3]] == here and (other[1] < end or other is left[0])]
            chosen.extend(other for other in rivals if other not in chosen)
            if kind != F:
                break
            left = [other for other in left if other[2] != F or other not in rivals]
        return chosen

    def safe(self, node: Node, one: int) -> bool:
        """Whether after one more forward every micro-batch can still get what it needs of the rank (the banker's check)."""
        here, stages = self.rank[one], self.stages
        room = self.caps[here] - node.held[here] - self.hold[one]
        if room >= self.need[here]:
            return True
        turns, last = [0] * len(self.pipes), [self.total[stages * pipe] for pipe in self.pipes]
        moved = True
        while moved:
            moved = False
            for pipe in self.pipes:
                while turns[pipe] < last[pipe]:
                    needs, gives = self.needs(node.done, here, pipe, turns[pipe], one)
                    if gives and needs > room:
                        break
                    room += gives
                    turns[pipe] += 1
                    moved = True
                    if room >= self.need[here]:
                        return True
        return all(turn == end for turn, end in zip(turns, last, strict=True))

    def needs(self, done: list[int], here: int, pipe: int, turn: int, one: int) -> tuple[float, float]:
        """What a micro-batch still needs of a rank's memory, and what it holds of it, once the next forward of a class is done."""
        needs = gives = 0.0
        for other in self.mine[here]:
            if other // self.stages == pipe and done[2 * len(self.rank) + other] <= turn:
                if done[other] + (other == one) > turn:
                    gives += self.hold[other]
                else:
                    needs += self.hold[other]
        return needs, gives

    def expand(self, node: Node, end: int, kind: int, one: int, layer: dict[tuple[int, ...], Node]) -> None:
        """Adds a node with one operation more to its layer, unless it is hopeless or an equal one is as good."""
        count, here = len(self.rank), self.rank[one]
        free, held, left, done, coming = node.free[:], node.held, node.left[:], node.done[:], node.coming[:]
        free[here] = end
        left[here] -= self.paid[kind][one]
        if kind == F:
            held = held[:]
            held[here] += self.hold[one]
            done[one] += 1
            coming[one] = coming[one][1:]
            after, lag = (count + one, 0) if self.last[one] else (one + 1, self.down[one + 1] if not self.last[one] else 0)
            coming[after] = (*coming[after], end + lag)
        elif kind == W:
            coming[2 * count + one] = coming[2 * count + one][1:]
        else:
            done[count + one] += 1
            coming[count + one] = coming[count + one][1:]
            if not self.first[one]:
                coming[count + one - 1] = (*coming[count + one - 1], end + self.up[one - 1])
            if kind == X:
                coming[2 * count + one] = (*coming[2 * count + one], end)
        if kind in (W, B):
            held = held[:]
            held[here] -= self.hold[one]
            done[2 * count + one] += 1
        key = (*done, *free)
        other = layer.get(key)
        if other is not None and other.coming == coming:
            return
        self.used += _CHILD
        bounds = self.bounds(free, held, left, done, coming)
        if bounds[1 if self.even else 0] > self.limit:
            return
        if other is None or bounds < other.bounds:
            layer[key] = Node(bounds, free, held, left, done, coming, node, (kind, one))

    def bounds(
        self, free: list[int], held: list[float], left: list[int], done: list[int], coming: list[tuple[int, ...]]
    ) -> tuple[float, float, float]:
        """A bound on the makespan, the sum over the ranks of what each is bound by, and the memory in use, of which more is better.

        A rank that has no backward to run until some time can until then only run what its memory and its data allow.
        """
        turns = self.turns(free, done, coming)
        count, worst, total = len(self.rank), 0.0, 0.0
        for here, mine in enumerate(self.mine):
            now = free[here]
            least: float = now + left[here]
            wait = min([turns[one] for one in mine if done[count + one] < self.total[one]], default=0)
            if wait > now:
                pending = [len(coming[2 * count + one]) for one in mine]
                room, before = self.caps[here] - held[here], 0.0
                for one, number in zip(mine, pending, strict=True):
                    before += number * self.seconds[W][one]
                    room += number * self.hold[one]
                for one in mine:
                    fit: float = self.total[one] - done[one]
                    if fit * self.hold[one] > room:
                        fit = room / self.hold[one]
                    before += fit * self.seconds[F][one]
                    room -= fit * self.hold[one]
                least = max(least, wait + left[here] - before)
            worst = max(worst, least)
            total += least
        return (total, worst, -sum(held)) if self.even else (worst, total, -sum(held))

    def turns(self, free: list[int], done: list[int], coming: list[tuple[int, ...]]) -> list[int]:
        """By class, the earliest start of its next backward."""
        count, stages, rank = len(self.rank), self.stages, self.rank
        turns = [0] * count
        for base in range(0, count, stages):
            now = 0
            for one in range(base, base + stages):
                if done[one] < self.total[one]:
                    wait = coming[one]
                    now = (
                        max(wait[0] if wait else now + self.down[one] if one > base else 0, free[rank[one]]) + self.seconds[F][one]
                    )
            for one in range(base + stages - 1, base - 1, -1):
                if done[count + one] < self.total[one]:
                    wait = coming[count + one]
                    ready = wait[0] if wait else now if one == base + stages - 1 else now + self.up[one]
                    turns[one] = max(ready, free[rank[one]])
                    now = turns[one] + self.back[one]
        return turns

    def plan(self, node: Node) -> Plan:
        """The operations of a node with all of them, as a plan."""
        place, ops = self.problem.placement, []
        while node.parent is not None:
            ops.append(node.op)
            node = node.parent
        fused = [False] * self.problem.num_cells
        ranks: list[list[int]] = [[] for _ in self.mine]
        turns = [[iter(place.microbatches(one // self.stages)) for one in self.classes] for _ in (F, X)]
        opened: list[list[int]] = [[] for _ in self.classes]
        for kind, one in reversed(ops):
            microbatch = opened[one].pop(0) if kind == W else next(turns[min(kind, 1)][one])
            cell = microbatch * self.stages + one % self.stages
            if kind == X:
                opened[one].append(microbatch)
            fused[cell] |= kind == B
            ranks[self.rank[one]].append(3 * cell + (X if kind == B else kind))
        return Plan(ranks, fused)
