"""The search's inner loop: one plan in flat lists, and the ends of its operations after a change.

An operation waits for the one before it on its rank and for at most one other, its data:

    F of stage s    F of stage s-1                 X of stage s    X of stage s+1, at the last stage its own F

That X comes after F and W after X on their rank is kept by the moves themselves (moves.py).

After a change only what ends at or after the first changed start is computed again, and not even that once it is clear that the
plan ends too late: an operation's end plus the shortest chain after it is a bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fxchimera.schedule.problem import Plan, Problem

__all__ = ["NEVER", "Shop", "accept", "make_shop", "makespan_of", "retime"]

NEVER = math.inf


@dataclass(slots=True)
class Shop:
    """A plan in lists.

    Args:
        rank: By operation, its rank.
        pred: By operation, the one whose data it waits for; -1 for none.
        alike: By operation, a number that those of one pipe, stage and kind share.
        succ: By operation, the one that waits for its data; -1 for none.
        lag: By operation, seconds on the way of the data it waits for.
        tail: By operation, the least seconds from its end to the end of its micro-batch's chain.
        seconds: By operation, its duration in the present choice of fused cells.
        hold: By operation, what it takes (F) or gives back (the last one of a cell) of the rank's memory.
        half: By cell, seconds of I.
        whole: By cell, seconds of B.
        caps: By rank, the memory.
        seq: By rank, the operations in order.
        pos: By operation, its place in ``seq``; -1 for the W of a fused cell.
        end: By operation, its end in the accepted plan.
        fresh: By operation, its end in the plan that is looked at.
        stamp: By operation, the number of the look at which ``fresh`` was set.
        log: The operations set in this look.
        path: The operations of one longest chain.
        look: Number of the look.
        work: Operations looked at so far, in all looks.
    """

    rank: list[int]
    alike: list[int]
    pred: list[int]
    succ: list[int]
    lag: list[float]
    tail: list[float]
    seconds: list[float]
    hold: list[float]
    half: list[float]
    whole: list[float]
    caps: list[float]
    seq: list[list[int]]
    pos: list[int]
    end: list[float]
    fresh: list[float]
    stamp: list[int]
    log: list[int]
    path: list[int]
    look: int = 0
    work: int = 0


def make_shop(problem: Problem, plan: Plan) -> Shop:
    """The lists of a plan; nothing is computed yet (:func:`retime` with ``since`` = -1 does it)."""
    costs, cells, stages = problem.costs, problem.num_cells, problem.placement.num_stages
    ops = 3 * cells
    pred, succ, lag = _links(problem)
    seconds, hold, pos = [0.0] * ops, [0.0] * ops, [-1] * ops
    half = [costs.input_grad[cell % stages] for cell in range(cells)]
    whole = [costs.full_backward(cell % stages) for cell in range(cells)]
    for cell in range(cells):
        stage = cell % stages
        seconds[3 * cell], hold[3 * cell] = costs.forward[stage], problem.holds[stage]
        seconds[3 * cell + 1] = whole[cell] if plan.fused[cell] else half[cell]
        seconds[3 * cell + 2] = costs.weight_grad[stage]
        hold[3 * cell + (1 if plan.fused[cell] else 2)] = -problem.holds[stage]
    for row in plan.ranks:
        for place, op in enumerate(row):
            pos[op] = place
    return Shop(
        rank=[rank for rank in problem.rank_of() for _ in range(3)],
        alike=[
            3 * (pipe * stages + stage) + kind for pipe in problem.placement.pipe_of for stage in range(stages) for kind in range(3)
        ],
        pred=pred,
        succ=succ,
        lag=lag,
        tail=_tails(problem, lag, half, whole),
        seconds=seconds,
        hold=hold,
        half=half,
        whole=whole,
        caps=[cap + 1e-6 for cap in problem.caps],
        seq=[list(row) for row in plan.ranks],
        pos=pos,
        end=[0.0] * ops,
        fresh=[0.0] * ops,
        stamp=[0] * ops,
        log=[],
        path=[],
    )


def makespan_of(problem: Problem, plan: Plan) -> float:
    """The makespan of a plan in seconds; NEVER where its ranks wait for each other."""
    return retime(make_shop(problem, plan), NEVER, -1.0, -1, 0)


def retime(shop: Shop, limit: float, since: float, moved: int, begin: int) -> float:
    """Computes the ends anew from ``since`` on into ``fresh``; returns the makespan, or NEVER where it passes ``limit``.

    Args:
        shop: The lists, the sequence already changed.
        limit: Give up as soon as the makespan must be above.
        since: No operation that ends before is affected; -1 computes all.
        moved: The rank whose sequence was changed; -1 for none.
        begin: The first changed place on that rank.
    """
    rank, pred, succ, lag, tail, seconds = shop.rank, shop.pred, shop.succ, shop.lag, shop.tail, shop.seconds
    end, fresh, stamp, seq = shop.end, shop.fresh, shop.stamp, shop.seq
    look, log, at, free = _begin(shop, since, moved, begin)
    left = sum(map(len, seq)) - sum(at)
    stack = list(range(len(seq)))
    while stack:
        one = stack.pop()
        row, place, now = seq[one], at[one], free[one]
        while place < len(row):
            op = row[place]
            data = pred[op]
            if data >= 0:
                if stamp[data] != look and end[data] >= since:
                    break
                ready = (fresh if stamp[data] == look else end)[data] + lag[op]
                if ready > now:
                    now = ready
            now += seconds[op]
            if now + tail[op] > limit:
                shop.work += len(log)
                return NEVER
            fresh[op], stamp[op] = now, look
            log.append(op)
            place += 1
            other = rank[succ[op]]
            if other != one and at[other] < len(seq[other]) and seq[other][at[other]] == succ[op]:
                stack.append(other)
        at[one], free[one] = place, now
    shop.work += len(log)
    return max(free) if len(log) == left else NEVER


def accept(shop: Shop) -> None:
    """Makes the ends that were looked at the accepted ones."""
    end, fresh = shop.end, shop.fresh
    for op in shop.log:
        end[op] = fresh[op]


def _begin(shop: Shop, since: float, moved: int, begin: int) -> tuple[int, list[int], list[int], list[float]]:
    """A new look and its empty log; by rank, the first place that must be computed again, and when the one before it ends."""
    shop.look += 1
    shop.log.clear()
    at, free, end = [], [], shop.end
    for one, row in enumerate(shop.seq):
        low, high = 0, begin if one == moved else len(row)
        while low < high:
            middle = (low + high) // 2
            if end[row[middle]] < since:
                low = middle + 1
            else:
                high = middle
        at.append(low)
        free.append(end[row[low - 1]] if low else 0.0)
    return shop.look, shop.log, at, free


def _links(problem: Problem) -> tuple[list[int], list[int], list[float]]:
    """By operation: whose data it waits for, who waits for its data, seconds on the way."""
    stages, ops = problem.placement.num_stages, 3 * problem.num_cells
    pred, succ, lag = [-1] * ops, [-1] * ops, [0.0] * ops
    ahead, back = problem.hops()
    for cell in range(problem.num_cells):
        microbatch, stage = divmod(cell, stages)
        pipe = problem.placement.pipe_of[microbatch]
        if stage:
            pred[3 * cell], lag[3 * cell] = 3 * cell - 3, ahead[pipe][stage - 1]
            succ[3 * cell + 1] = 3 * cell - 2
        if stage < stages - 1:
            succ[3 * cell] = 3 * cell + 3
            pred[3 * cell + 1], lag[3 * cell + 1] = 3 * cell + 4, back[pipe][stage]
        else:
            succ[3 * cell], pred[3 * cell + 1] = 3 * cell + 1, 3 * cell
    return pred, succ, lag


def _tails(problem: Problem, lag: Sequence[float], half: Sequence[float], whole: Sequence[float]) -> list[float]:
    """By operation, the shortest chain after it."""
    stages, tail = problem.placement.num_stages, [0.0] * len(lag)
    for cell in range(problem.num_cells):
        if cell % stages:
            below = 3 * (cell - 1) + 1
            tail[3 * cell + 1] = lag[below] + min(half[cell - 1], whole[cell - 1]) + tail[below]
    for cell in reversed(range(problem.num_cells)):
        stage = cell % stages
        if stage == stages - 1:
            tail[3 * cell] = min(half[cell], whole[cell]) + tail[3 * cell + 1]
        else:
            tail[3 * cell] = lag[3 * cell + 3] + problem.costs.forward[stage + 1] + tail[3 * cell + 3]
    return tail
