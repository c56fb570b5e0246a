"""The search's inner loop: one plan in flat arrays, and the seconds of its operations after a change.

Everything here is written so that it runs on plain lists and, unchanged, compiled by numba on arrays (kernel.py): indices, numbers,
loops.  An operation waits for the one before it on its rank and for at most one other, its data:

    F of stage s    F of stage s-1                 X of stage s    X of stage s+1, at the last stage its own F

that its W and its X come after its F and X on the same rank is kept by the moves themselves.

After a change only what ends at or after the first changed start is computed again, and not even that once it is clear that the
plan ends too late: an operation's end plus the shortest chain after it is a bound.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from fxchimera.schedule.problem import Plan, Problem

__all__ = ["NEVER", "Shop", "make_shop", "plan_of", "retime"]

NEVER = 1e300


class Shop(NamedTuple):
    """A plan in arrays; lists here, numpy arrays when compiled.

    Args:
        rank: By operation, its rank.
        pred: By operation, the one whose data it waits for; -1 for none.
        succ: By operation, the one that waits for its data; -1 for none.
        lag: By operation, seconds on the way of the data it waits for.
        tail: By operation, the least seconds from its end to the end of its micro-batch's chain.
        seconds: By operation, its duration in the present choice of fused cells.
        hold: By operation, what it takes (F) or gives back (the last one of a cell) of the rank's memory.
        half: By cell, seconds of I.
        whole: By cell, seconds of B.
        caps: By rank, the memory.
        seq: By rank, the operations in order, padded at the end with -1.
        size: By rank, the number of operations.
        pos: By operation, its place in ``seq``; -1 for the W of a fused cell.
        end: By operation, its end in the accepted plan.
        fresh: By operation, its end in the plan that is looked at.
        stamp: By operation, the number of the look at which ``fresh`` was set.
        log: The operations set in this look.
        at: By rank, the place reached in this look.
        free: By rank, when it becomes free in this look.
        stack: Ranks to look at.
        path: Scratch for the critical operations.
        state: Number of the look, length of ``log``, length of ``path``, operations looked at in all.
    """

    rank: Any
    pred: Any
    succ: Any
    lag: Any
    tail: Any
    seconds: Any
    hold: Any
    half: Any
    whole: Any
    caps: Any
    seq: Any
    size: Any
    pos: Any
    end: Any
    fresh: Any
    stamp: Any
    log: Any
    at: Any
    free: Any
    stack: Any
    path: Any
    state: Any


def make_shop(problem: Problem, plan: Plan) -> Shop:
    """The arrays of a plan; nothing is computed yet (:func:`retime` with ``since`` = -1 does it)."""
    place, costs, cells = problem.placement, problem.costs, problem.num_cells
    stages, ops, ranks = place.num_stages, 3 * problem.num_cells, place.num_ranks
    pred, succ, lag = _links(problem)
    seconds, hold = [0.0] * ops, [0.0] * ops
    half, whole = ([values[cell % stages] for cell in range(cells)] for values in _backwards(problem))
    for cell in range(cells):
        stage = cell % stages
        seconds[3 * cell], hold[3 * cell] = costs.forward[stage], problem.holds[stage]
        seconds[3 * cell + 1] = whole[cell] if plan.fused[cell] else half[cell]
        seconds[3 * cell + 2] = costs.weight_grad[stage]
        hold[3 * cell + (1 if plan.fused[cell] else 2)] = -problem.holds[stage]
    width = 1 + max(3 * sum(1 for rank in problem.rank_of() if rank == one) for one in range(ranks))
    pos = [-1] * ops
    for actions in plan.ranks:
        for place_, op in enumerate(actions):
            pos[op] = place_
    return Shop(
        rank=[rank for rank in problem.rank_of() for _ in range(3)],
        pred=pred,
        succ=succ,
        lag=lag,
        tail=_tails(problem, lag, half, whole),
        seconds=seconds,
        hold=hold,
        half=half,
        whole=whole,
        caps=[cap + 1e-6 for cap in problem.caps],
        seq=[list(actions) + [-1] * (width - len(actions)) for actions in plan.ranks],
        size=[len(actions) for actions in plan.ranks],
        pos=pos,
        end=[0.0] * ops,
        fresh=[0.0] * ops,
        stamp=[0] * ops,
        log=[0] * ops,
        at=[0] * ranks,
        free=[0.0] * ranks,
        stack=[0] * (ops + 2 * ranks),
        path=[0] * ops,
        state=[0, 0, 0, 0],
    )


def plan_of(shop: Shop) -> Plan:
    """The plan in the arrays."""
    ranks = [[int(op) for op in row[: int(size)]] for row, size in zip(shop.seq, shop.size, strict=True)]
    return Plan(ranks, [bool(shop.pos[3 * cell + 2] < 0) for cell in range(len(shop.half))])


def retime(shop: Shop, limit: float, since: float, moved: int, begin: int) -> float:
    """Computes the ends anew from ``since`` on into ``fresh``; returns the makespan, or NEVER where it passes ``limit``.

    Args:
        shop: The arrays, the sequence already changed.
        limit: Give up as soon as the makespan must be above.
        since: No operation that ends before is affected; -1 computes all.
        moved: The rank whose sequence was changed; -1 for none.
        begin: The first changed place on that rank.
    """
    rank, pred, succ, lag, tail, seconds = shop.rank, shop.pred, shop.succ, shop.lag, shop.tail, shop.seconds
    end, fresh, stamp, log, at, free, stack = shop.end, shop.fresh, shop.stamp, shop.log, shop.at, shop.free, shop.stack
    seq, size, state = shop.seq, shop.size, shop.state
    state[0] += 1
    look, done, top, left = state[0], 0, 0, 0
    makespan = 0.0
    for one in range(len(size)):
        low, high = 0, begin if one == moved else size[one]
        while low < high:
            middle = (low + high) // 2
            if end[seq[one][middle]] < since:
                low = middle + 1
            else:
                high = middle
        at[one] = low
        free[one] = end[seq[one][low - 1]] if low else 0.0
        left += size[one] - low
        stack[top] = one
        top += 1
    while top:
        top -= 1
        one = stack[top]
        row, place, last, now = seq[one], at[one], size[one], free[one]
        while place < last:
            op = row[place]
            data = pred[op]
            if data >= 0:
                if stamp[data] == look:
                    ready = fresh[data] + lag[op]
                elif end[data] < since:
                    ready = end[data] + lag[op]
                else:
                    break
                if ready > now:
                    now = ready
            now += seconds[op]
            if now + tail[op] > limit:
                state[1] = done
                return NEVER
            fresh[op] = now
            stamp[op] = look
            log[done] = op
            done += 1
            place += 1
            waiting = succ[op]
            if waiting >= 0:
                other = rank[waiting]
                if other != one and at[other] < size[other] and seq[other][at[other]] == waiting:
                    stack[top] = other
                    top += 1
        at[one] = place
        free[one] = now
    state[1] = done
    state[3] += done
    if done < left:
        return NEVER  # the ranks wait for each other
    for one in range(len(size)):
        if free[one] > makespan:
            makespan = free[one]
    return makespan


def _backwards(problem: Problem) -> tuple[Sequence[float], Sequence[float]]:
    """By stage, seconds of I and of B."""
    costs = problem.costs
    return costs.input_grad, [costs.full_backward(stage) for stage in range(len(costs.forward))]


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


def _tails(problem: Problem, lag: list[float], half: list[float], whole: list[float]) -> list[float]:
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


def random_numbers(seed: int, count: int) -> list[float]:
    """Numbers in (0, 1), the same on every machine."""
    generator = random.Random(seed)
    return [generator.random() for _ in range(count)]
