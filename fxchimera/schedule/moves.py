"""Simulated annealing of rank orders: move one operation a few places, or fuse or split one backward.

Two thirds of the moves touch an operation of a longest chain, which is what determines the makespan; the others are blind.  A move
is dropped before any time is computed when it breaks the order within a cell or the rank's memory.

Runs on lists, and compiled by numba on arrays; see shop.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fxchimera.schedule.shop import NEVER, Shop, retime

__all__ = ["PER_MOVE", "anneal"]

PER_MOVE = 5  # random numbers that a move takes
"""Random numbers a move takes."""


def anneal(shop: Shop, numbers: Sequence[float], hot: float, cold: float, window: int, toggles: float, best: Any, floor: float) -> float:
    """Improves the plan in ``shop``; returns the best makespan found, whose sequence is then in ``best``.

    Args:
        shop: A plan whose ``end`` is computed.
        numbers: PER_MOVE random numbers in (0, 1) a move.
        hot: Temperature of the first move, in seconds.
        cold: Temperature of the last move.
        window: Most places by which an operation moves.
        toggles: Share of the moves that fuse or split a backward.
        best: A copy of ``seq``, overwritten.
        floor: A proven bound: stop when it is reached.
    """
    moves = len(numbers) // 5
    now = retime(shop, NEVER, -1.0, -1, 0)
    accept(shop)
    critical(shop, 0.5)
    least = now
    keep(shop, best)
    for move in range(moves):
        if least <= floor:
            break
        first = 5 * move
        limit = now - hot * (cold / hot) ** (move / moves) * math.log(numbers[first + 4]) + 1e-12
        if numbers[first] < toggles:
            found = toggle(shop, int(numbers[first + 1] * len(shop.half)), limit)
        else:
            op = int(numbers[first + 1] * len(shop.pos))
            if numbers[first + 3] < 0.67:
                op = shop.path[int(numbers[first + 1] * shop.state[2])]
            later = numbers[first + 2] < 0.5
            steps = 1 + int((2 * numbers[first + 2] % 1.0) * window)
            found = shift(shop, op, steps, later, limit)
        if found < NEVER:
            now = found
            if now < least - 1e-12:
                least = now
                keep(shop, best)
            critical(shop, numbers[first + 3])
    return least


def shift(shop: Shop, op: int, steps: int, later: bool, limit: float) -> float:
    """Moves an operation up to ``steps`` places; returns the makespan if it stays within the limit, else NEVER, undone."""
    row, pos, hold, one = shop.seq[shop.rank[op]], shop.pos, shop.hold, shop.rank[op]
    here = pos[op]
    if here < 0:
        return NEVER
    target, last = here, shop.size[one] - 1
    while steps > 0 and (target < last if later else target > 0):
        other = row[target + 1 if later else target - 1]
        if other // 3 == op // 3:
            break
        target += 1 if later else -1
        steps -= 1
    if target == here:
        return NEVER
    low = min(here, target)
    change = hold[op] if target < here else -hold[op]
    if change > 0.0 and not fits(shop, one, low, max(here, target), change, later):
        return NEVER
    since = shop.end[row[low]] - shop.seconds[row[low]]
    slide(row, pos, here, target)
    found = retime(shop, limit, since, one, low)
    if found < NEVER:
        accept(shop)
    else:
        slide(row, pos, target, here)
    return found


def fits(shop: Shop, one: int, low: int, high: int, change: float, later: bool) -> bool:
    """Whether the rank's memory holds when ``change`` more is held between two places (the moved operation is one of the ends)."""
    row, hold, level, most = shop.seq[one], shop.hold, 0.0, 0.0
    for place in range(high + 1):
        level += hold[row[place]]
        if place >= low and not (later and place == low) and level > most:
            most = level
    if later:
        return bool(most + change <= shop.caps[one])
    level -= hold[row[high]]
    most = 0.0
    for place in range(high - 1, low - 1, -1):
        most = max(most, level)
        level -= hold[row[place]]
    return bool(max(most, level) + change <= shop.caps[one])


def slide(row: Any, pos: Any, here: int, target: int) -> None:
    """Moves the entry at one place to another; those between close up."""
    op = row[here]
    step = 1 if target > here else -1
    for place in range(here, target, step):
        row[place] = row[place + step]
        pos[row[place]] = place
    row[target] = op
    pos[op] = target


def toggle(shop: Shop, cell: int, limit: float) -> float:
    """Splits a fused backward or fuses a split one; returns the makespan if it stays within the limit, else NEVER, undone."""
    back, weight = 3 * cell + 1, 3 * cell + 2
    one, split = shop.rank[back], shop.pos[weight] >= 0
    since = shop.end[back] - shop.seconds[back]
    where = shop.pos[weight]
    if split:
        fuse(shop, cell)
        if not holds(shop, one):
            divide(shop, cell, where)
            return NEVER
    else:
        divide(shop, cell, shop.pos[back] + 1)
    found = retime(shop, limit, since, one, shop.pos[back])
    if found < NEVER:
        accept(shop)
    elif split:
        divide(shop, cell, where)
    else:
        fuse(shop, cell)
    return found


def fuse(shop: Shop, cell: int) -> None:
    """Takes the W of a cell out of its rank; X becomes the full backward."""
    back, weight = 3 * cell + 1, 3 * cell + 2
    one = shop.rank[back]
    slide(shop.seq[one], shop.pos, shop.pos[weight], shop.size[one] - 1)
    shop.size[one] -= 1
    shop.seq[one][shop.size[one]] = -1
    shop.pos[weight] = -1
    shop.seconds[back] = shop.whole[cell]
    shop.hold[back], shop.hold[weight] = shop.hold[weight], 0.0


def divide(shop: Shop, cell: int, where: int) -> None:
    """Puts the W of a cell at a place of its rank; X becomes the input gradient."""
    back, weight = 3 * cell + 1, 3 * cell + 2
    one = shop.rank[back]
    shop.seq[one][shop.size[one]] = weight
    shop.pos[weight] = shop.size[one]
    shop.size[one] += 1
    slide(shop.seq[one], shop.pos, shop.size[one] - 1, where)
    shop.seconds[back] = shop.half[cell]
    shop.hold[back], shop.hold[weight] = 0.0, shop.hold[back]


def holds(shop: Shop, one: int) -> bool:
    """Whether a rank's memory holds."""
    level = 0.0
    for place in range(shop.size[one]):
        level += shop.hold[shop.seq[one][place]]
        if level > shop.caps[one]:
            return False
    return True


def accept(shop: Shop) -> None:
    """Makes the ends that were looked at the accepted ones."""
    end, fresh, log = shop.end, shop.fresh, shop.log
    for number in range(shop.state[1]):
        end[log[number]] = fresh[log[number]]


def keep(shop: Shop, best: Any) -> None:
    """Copies the sequence."""
    for one in range(len(shop.size)):
        row, copy = shop.seq[one], best[one]
        for place in range(len(row)):
            copy[place] = row[place]


def critical(shop: Shop, chance: float) -> None:
    """Notes one longest chain in ``path``, last operation first; where two lead to the same start, ``chance`` decides."""
    end, pos, seq, path = shop.end, shop.pos, shop.seq, shop.path
    op, latest = -1, -1.0
    for one in range(len(shop.size)):
        last = seq[one][shop.size[one] - 1]
        if end[last] > latest + (1e-12 if chance < 0.34 else -1e-12):
            op, latest = last, end[last]
    length = 0
    while op >= 0:
        path[length] = op
        length += 1
        begin = end[op] - shop.seconds[op] - 1e-9
        before = seq[shop.rank[op]][pos[op] - 1] if pos[op] > 0 else -1
        data = shop.pred[op]
        by_rank = before >= 0 and end[before] >= begin
        by_data = data >= 0 and end[data] + shop.lag[op] >= begin
        if by_rank and by_data:
            op = before if (chance * (length + 7) * 1.618) % 1.0 < 0.5 else data
        elif by_rank:
            op = before
        elif by_data:
            op = data
        else:
            op = -1
    shop.state[2] = length
