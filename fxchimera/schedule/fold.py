"""One half of a mirrored order stands for the whole: half the ranks, half the micro-batches, the same makespan.

    bidirectional, 4 ranks          folded, 2 ranks
    rank      0  1  2  3            rank      0  1
    down      0  1  2  3            down      0  1
    up        3  2  1  0                      3  2     (the message from 1 to 2 still takes its time)

Where both directions carry equally many micro-batches, an order in which rank D-1-r does what rank r does with the directions
exchanged takes as long as its first half alone.  A search over such orders looks at half as many operations in a far smaller
space; DualPipe and Chimera are orders of that kind.
"""

from __future__ import annotations

from fxchimera.schedule.placement import Placement
from fxchimera.schedule.problem import Plan, Problem

__all__ = ["fold", "folded_plan", "unfold"]


def fold(problem: Problem) -> Problem | None:
    """The half of a problem; None where placement or caps are not mirrored, the directions differ, or a cap is below a pair."""
    place = problem.placement
    ranks, pipes = place.num_ranks, place.pipes
    if ranks % 2 or len(pipes) != 2 or pipes[1] != tuple(ranks - 1 - rank for rank in pipes[0]):
        return None
    if len(place.microbatches(0)) != len(place.microbatches(1)) or problem.caps != problem.caps[::-1]:
        return None
    half = tuple(min(rank, ranks - 1 - rank) for rank in pipes[0])
    for rank in range(ranks // 2):
        if sum(problem.holds[stage] for stage, here in enumerate(half) if here == rank) > problem.caps[rank]:
            return None
    away = frozenset(stage for stage in range(place.num_stages - 1) if half[stage] == half[stage + 1] and _leaves(pipes[0], stage))
    folded = Placement(place.num_stages, (half,), (0,) * len(place.microbatches(0)))
    return Problem(folded, problem.costs, problem.caps[: ranks // 2], problem.holds, problem.split, away)


def _leaves(pipe: tuple[int, ...], stage: int) -> bool:
    return pipe[stage] != pipe[stage + 1]


def unfold(problem: Problem, plan: Plan) -> Plan:
    """The plan of the whole problem whose first half is a plan of the folded one."""
    place, stages = problem.placement, problem.placement.num_stages
    members = place.microbatches(0), place.microbatches(1)
    fused = [False] * problem.num_cells
    for cell, whole in enumerate(plan.fused):
        turn, stage = divmod(cell, stages)
        for pipe in members:
            fused[pipe[turn] * stages + stage] = whole
    ranks: list[list[int]] = []
    for rank in range(place.num_ranks):
        row = []
        for op in plan.ranks[min(rank, place.num_ranks - 1 - rank)]:
            cell, kind = divmod(op, 3)
            turn, stage = divmod(cell, stages)
            pipe = members[0 if place.pipes[0][stage] == rank else 1]
            row.append(3 * (pipe[turn] * stages + stage) + kind)
        ranks.append(row)
    return Plan(ranks, fused)


def folded_plan(problem: Problem, plan: Plan) -> Plan:
    """The first half of a plan, whether or not the other half mirrors it."""
    place, stages = problem.placement, problem.placement.num_stages
    turns = {microbatch: turn for pipe in (0, 1) for turn, microbatch in enumerate(place.microbatches(pipe))}
    half = place.num_ranks // 2
    fused = [False] * (problem.num_cells // 2)
    ranks: list[list[int]] = []
    for rank in range(half):
        row = []
        for op in plan.ranks[rank]:
            cell, kind = divmod(op, 3)
            microbatch, stage = divmod(cell, stages)
            mirrored = turns[microbatch] * stages + stage
            fused[mirrored] = plan.fused[cell]
            row.append(3 * mirrored + kind)
        ranks.append(row)
    return Plan(ranks, fused)
