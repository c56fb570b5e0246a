"""Lower bounds on the makespan of any order of a placement, whatever its rule.

A rank r has work_r seconds of computations, F_r of them forwards.  Nothing can start on it before a micro-batch has come down to it
(head_r); no backward before one has gone down the whole pipe and back up to it (turn_r).

    head     head_r + work_r (+ tail_r where backwards are whole: the shortest way back after the rank's last one)
    fill     turn_r + work_r - the forwards that fit into its memory: until turn_r it can run nothing else
    memory   head_r + (seconds for which activations must at least be held on r) / cap_r
    chain    one micro-batch alone, all the way

With k copies of the weights and v chunks a rank, head alone says that no order has a bubble below (ceil(D/k)-1)(F/v + c).
"""

from __future__ import annotations

from dataclasses import dataclass

from fxchimera.schedule.problem import Problem

__all__ = ["Bound", "lower_bound"]


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven lower bound.

    Args:
        seconds: No order takes less.
        argument: Which of the arguments gives it, and on which rank.
    """

    seconds: float
    argument: str


def lower_bound(problem: Problem) -> Bound:
    """The best of the bounds for one placement, its costs and caps."""
    place = problem.placement
    found = [Bound(_chain(problem), "chain: one micro-batch alone")]
    arrivals = _arrivals(problem)
    for rank in range(place.num_ranks):
        cells = place.replicas(rank)
        work, tail = _work(problem, rank), min(arrivals[pipe][2][stage] for pipe, stage in cells)
        head = min(arrivals[pipe][0][stage] for pipe, stage in cells)
        turn = min(arrivals[pipe][1][stage] for pipe, stage in cells)
        found.append(Bound(head + work + tail, f"head: the first forward reaches rank {rank} after {head:g} s"))
        early = _forwards_within(problem, rank)
        wait = f"fill: rank {rank} waits {turn - early:g} s for its first backward with its memory full"
        found.append(Bound(turn + work - early + tail, wait))
        held = _held(problem, rank, arrivals)
        if held > 0 and problem.caps[rank] < float("inf"):
            found.append(Bound(head + held / problem.caps[rank], f"memory: activations stay on rank {rank}"))
    return max(found, key=lambda bound: bound.seconds)


def _least_back(problem: Problem, stage: int) -> float:
    """Least seconds until a stage's input gradient is there."""
    whole = problem.costs.full_backward(stage)
    return min(whole, problem.costs.input_grad[stage]) if problem.split else whole


def _least_whole(problem: Problem, stage: int) -> float:
    """Least seconds of a stage's whole backward."""
    whole = problem.costs.full_backward(stage)
    return min(whole, problem.costs.input_grad[stage] + problem.costs.weight_grad[stage]) if problem.split else whole


def _arrivals(problem: Problem) -> list[tuple[list[float], list[float], list[float]]]:
    """By pipe, three lists by stage: first start of a forward, first start of a backward, seconds after the last operation."""
    place, costs, stages = problem.placement, problem.costs, problem.placement.num_stages
    ahead, back = problem.hops()
    found = []
    for pipe in range(len(place.pipes)):
        down = [0.0] * stages
        for stage in range(1, stages):
            down[stage] = down[stage - 1] + costs.forward[stage - 1] + ahead[pipe][stage - 1]
        turn = [0.0] * stages
        turn[-1] = down[-1] + costs.forward[-1]
        for stage in reversed(range(stages - 1)):
            turn[stage] = turn[stage + 1] + _least_back(problem, stage + 1) + back[pipe][stage]
        tail = [0.0] * stages
        if not problem.split:
            for stage in range(1, stages):
                tail[stage] = tail[stage - 1] + _least_back(problem, stage - 1) + back[pipe][stage - 1]
        found.append((down, turn, tail))
    return found


def _work(problem: Problem, rank: int) -> float:
    place = problem.placement
    return sum(
        len(place.microbatches(pipe)) * (problem.costs.forward[stage] + _least_whole(problem, stage))
        for pipe, stage in place.replicas(rank)
    )


def _forwards_within(problem: Problem, rank: int) -> float:
    """Most seconds of forwards whose activations fit into a rank's memory at once (in part too, which only weakens the bound)."""
    place, room, seconds = problem.placement, problem.caps[rank], 0.0
    cells = []
    for pipe, stage in place.replicas(rank):
        forward, hold = problem.costs.forward[stage], problem.holds[stage]
        cells.append((forward / hold if hold else float("inf"), forward, hold, len(place.microbatches(pipe))))
    for _, forward, hold, number in sorted(cells, reverse=True):
        fit = min(number, room / hold) if hold else number
        seconds += fit * forward
        room -= fit * hold
    return seconds


def _held(problem: Problem, rank: int, arrivals: list[tuple[list[float], list[float], list[float]]]) -> float:
    """Sum over a rank's activations of what they hold times the least seconds between start of the forward and release."""
    place, total = problem.placement, 0.0
    for pipe, stage in place.replicas(rank):
        life = arrivals[pipe][1][stage] - arrivals[pipe][0][stage] + _least_whole(problem, stage)
        total += len(place.microbatches(pipe)) * problem.holds[stage] * life
    return total


def _chain(problem: Problem) -> float:
    """One micro-batch alone: down, up, and the weight gradient of stage 0."""
    return max(turn[0] for _, turn, _ in _arrivals(problem)) + _least_whole(problem, 0)
