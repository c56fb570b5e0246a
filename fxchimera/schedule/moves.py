"""Simulated annealing of rank orders: move one operation a few places, or fuse or split one backward.

Two thirds of the moves touch an operation of a longest chain, which is what determines the makespan; the others are blind.  A move
is dropped before any time is computed when it breaks the order within a cell or the rank's memory.

The budget counts operations looked at, not seconds, so one seed gives one result on every machine.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from fxchimera.schedule.problem import Plan, Problem
from fxchimera.schedule.shop import NEVER, Shop, accept, make_shop, retime

__all__ = ["Annealing", "anneal", "fused_where_free"]

_MOVE = 6  # what a move costs beside the operations that it looks at, in operations


@dataclass(frozen=True, slots=True, kw_only=True)
class Annealing:
    """How to anneal.

    Args:
        budget: Operations to look at; some million a second.
        hot: First temperature, in units of the mean forward.
        cold: Last temperature, in the same unit.
        window: Most places by which an operation moves.
        toggles: Share of the moves that fuse or split a backward.
        in_turn: Keep micro-batches that are alike in turn: better where little memory makes few orders good.
        floor: A proven lower bound in seconds: stop when it is reached.
        seed: Of the random numbers.
    """

    budget: int
    hot: float = 0.03
    cold: float = 0.001
    window: int = 12
    toggles: float = 0.0
    in_turn: bool = False
    floor: float = 0.0
    seed: int = 0


def anneal(problem: Problem, plan: Plan, how: Annealing) -> tuple[Plan, float]:
    """The best plan found from a plan within the caps, and its makespan in seconds."""
    shop, chance = make_shop(problem, plan), random.Random(how.seed).random
    unit = sum(problem.costs.forward) / len(problem.costs.forward) or 1.0
    now = least = retime(shop, NEVER, -1.0, -1, 0)
    accept(shop)
    critical(shop, 0.5)
    best = [list(row) for row in shop.seq]
    moves, cells = 0, len(shop.half)
    while least > how.floor + 1e-9 and (used := shop.work + _MOVE * moves) < how.budget:
        moves += 1
        heat = unit * how.hot * (how.cold / how.hot) ** (used / how.budget)
        limit = now - heat * math.log(1.0 - chance()) + 1e-12
        guided, toggles = chance() < 0.67, how.toggles > 0.0 and chance() < how.toggles
        op = shop.path[int(chance() * len(shop.path))] if guided else int(chance() * len(shop.pos))
        steps, later = 1 + int(chance() * how.window), chance() < 0.5
        found = toggle(shop, op // 3, limit) if toggles else shift(shop, op, steps, later, limit, how.in_turn)
        if found < NEVER:
            now = found
            critical(shop, chance())
            if now < least - 1e-12:
                least, best = now, [list(row) for row in shop.seq]
    present = {op for row in best for op in row}
    return Plan(best, [3 * cell + 2 not in present for cell in range(cells)]), least


def fused_where_free(problem: Problem, plan: Plan, budget: int, *, anywhere: bool = False) -> tuple[Plan, float]:
    """The plan with a split backward made whole wherever its W follows at once and the makespan stays, and that makespan.

    Fewer, larger operations: what the model does not charge (launches, a second walk over the graph) is saved.

    Args:
        problem: The problem.
        plan: A plan within its caps.
        budget: Operations to look at.
        anywhere: Also where the W comes later.
    """
    shop = make_shop(problem, plan)
    makespan = retime(shop, NEVER, -1.0, -1, 0)
    accept(shop)
    for cell in range(len(shop.half)):
        weight = shop.pos[3 * cell + 2]
        if weight >= 0 and (anywhere or weight == shop.pos[3 * cell + 1] + 1) and shop.work < budget:
            makespan = min(makespan, toggle(shop, cell, makespan + 1e-12))
            shop.work += len(shop.seq[shop.rank[3 * cell]]) // 8
    return Plan(shop.seq, [place < 0 for place in shop.pos[2::3]]), makespan


def shift(shop: Shop, op: int, steps: int, later: bool, limit: float, in_turn: bool) -> float:
    """Moves an operation up to ``steps`` places; returns the makespan if it stays within the limit, else NEVER, undone.

    Micro-batches of a pipe are alike: with ``in_turn``, where it passes others of its kind, all of them move up by one instead.
    """
    one = shop.rank[op]
    row, here = shop.seq[one], shop.pos[op]
    if here < 0:
        return NEVER
    target, passed = _target(shop, op, steps, later, in_turn)
    if target == here:
        return NEVER
    low, high = (here, target) if later else (target, here)
    old = row[low : high + 1]
    new = [*old[1:], op] if later else [op, *old[:-1]]
    members = _in_turn(shop, new, op) if passed else ()
    if (shop.hold[op] < 0.0 if later else shop.hold[op] > 0.0) and not _fits(shop, one, low, new):
        return NEVER
    since = shop.end[old[0]] - shop.seconds[old[0]]
    _write(row, shop.pos, low, new)
    found = retime(shop, limit, since, one, low) if all(_follows(shop, member) for member in members) else NEVER
    if found < NEVER:
        accept(shop)
    else:
        _write(row, shop.pos, low, old)
    return found


def _target(shop: Shop, op: int, steps: int, later: bool, in_turn: bool) -> tuple[int, bool]:
    """The place up to which an operation can move, and whether it has to change places with others of its kind."""
    row, target, passed, alike = shop.seq[shop.rank[op]], shop.pos[op], False, shop.alike
    kind, split = alike[op], op % 3 == 1 and shop.pos[op + 1] >= 0
    step, edge = (1, len(row) - 1) if later else (-1, 0)
    while steps and target != edge:
        other = row[target + step]
        if other // 3 == op // 3 and not passed:
            break
        if in_turn and alike[other] == kind:
            if op % 3 == 1 and (shop.pos[other + 1] >= 0) is not split:
                break
            passed = True
        target += step
        steps -= 1
    return target, passed


def _in_turn(shop: Shop, new: list[int], op: int) -> list[int]:
    """Sorts the operations that are alike among their places; returns them."""
    kind = shop.alike[op]
    places = [place for place, other in enumerate(new) if shop.alike[other] == kind]
    members = sorted([new[place] for place in places])
    for place, member in zip(places, members, strict=True):
        new[place] = member
    return members


def _follows(shop: Shop, op: int) -> bool:
    """Whether an operation has its place after the ones of its cell that come before it, and before the ones that come after."""
    cell, pos = 3 * (op // 3), shop.pos
    return pos[cell] < pos[cell + 1] and (pos[cell + 2] < 0 or pos[cell + 1] < pos[cell + 2])


def _fits(shop: Shop, one: int, low: int, new: list[int]) -> bool:
    """Whether the rank's memory holds with other operations from a place on."""
    hold, cap = shop.hold, shop.caps[one]
    level = sum([hold[op] for op in shop.seq[one][:low]])
    for op in new:
        level += hold[op]
        if level > cap:
            return False
    return True


def _write(row: list[int], pos: list[int], low: int, new: list[int]) -> None:
    """Puts operations at the places from one on."""
    row[low : low + len(new)] = new
    for place, op in enumerate(new, low):
        pos[op] = place


def toggle(shop: Shop, cell: int, limit: float) -> float:
    """Splits a fused backward or fuses a split one; returns the makespan if it stays within the limit, else NEVER, undone."""
    back, where = 3 * cell + 1, shop.pos[3 * cell + 2]
    one, since = shop.rank[back], shop.end[back] - shop.seconds[back]
    if where >= 0:
        _fuse(shop, cell)
        if not _holds(shop, one):
            _divide(shop, cell, where)
            return NEVER
    else:
        _divide(shop, cell, shop.pos[back] + 1)
    found = retime(shop, limit, since, one, shop.pos[back])
    if found < NEVER:
        accept(shop)
    elif where >= 0:
        _divide(shop, cell, where)
    else:
        _fuse(shop, cell)
    return found


def _fuse(shop: Shop, cell: int) -> None:
    """Takes the W of a cell out of its rank; X becomes the full backward."""
    back, weight = 3 * cell + 1, 3 * cell + 2
    row = shop.seq[shop.rank[back]]
    del row[shop.pos[weight]]
    for place in range(shop.pos[weight], len(row)):
        shop.pos[row[place]] = place
    shop.pos[weight] = -1
    shop.seconds[back] = shop.whole[cell]
    shop.hold[back], shop.hold[weight] = shop.hold[weight], 0.0


def _divide(shop: Shop, cell: int, where: int) -> None:
    """Puts the W of a cell at a place of its rank; X becomes the input gradient."""
    back, weight = 3 * cell + 1, 3 * cell + 2
    row = shop.seq[shop.rank[back]]
    row.insert(where, weight)
    for place in range(where, len(row)):
        shop.pos[row[place]] = place
    shop.seconds[back] = shop.half[cell]
    shop.hold[back], shop.hold[weight] = 0.0, shop.hold[back]


def _holds(shop: Shop, one: int) -> bool:
    """Whether a rank's memory holds."""
    level = 0.0
    for op in shop.seq[one]:
        level += shop.hold[op]
        if level > shop.caps[one]:
            return False
    return True


def critical(shop: Shop, choice: float) -> None:
    """Notes one longest chain in ``path``, last operation first; ``choice`` in [0, 1) decides between several."""
    end, pos, seq = shop.end, shop.pos, shop.seq
    last = [row[-1] for row in seq if row]
    latest = max(end[op] for op in last) - 1e-9
    ends = [op for op in last if end[op] >= latest]
    op, path = ends[int(choice * len(ends))], shop.path
    path.clear()
    while op >= 0:
        path.append(op)
        begin = end[op] - shop.seconds[op] - 1e-9
        before = seq[shop.rank[op]][pos[op] - 1] if pos[op] else -1
        data = shop.pred[op]
        by_rank = before >= 0 and end[before] >= begin
        by_data = data >= 0 and end[data] + shop.lag[op] >= begin
        if by_rank and by_data:
            op = before if (choice * (len(path) + 7) * 1.618) % 1.0 < 0.5 else data
        else:
            op = before if by_rank else data if by_data else -1
