"""List scheduling: whenever a rank is free it takes the best operation that is ready, by a rule.

    1  the ready backward of the deepest stage (its chain is the longest)
    2  else the deepest ready forward for which there is memory
    3  else the oldest weight gradient

At free communication and F = I = W this meets the lower bound of its placement (bounds.py); the variations of :class:`Rule`
are for latency, uneven stages and little memory.

Memory never deadlocks: a forward starts only if afterwards, walking the micro-batches on the way from the oldest on, what is free
plus what the older ones give back covers what each still needs on the rank (the banker's check).  Then the oldest micro-batch can
always be finished everywhere, hence the next, and so on.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from fxchimera.schedule.problem import Plan, Problem

__all__ = ["Rule", "listed"]

_EPS = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a free rank chooses.

    Args:
        w_from: Weight gradients come before forwards while at least this share of the memory is held.
        shallow: Take the shallowest ready backward instead of the deepest.
        forward_first: Forwards before backwards.
        wait: Leave the rank idle instead of a weight gradient if a backward arrives within this share of its seconds.
        wait_forward: The same for forwards.
        credit: (alpha, beta): a pipe holds at most floor(alpha * lifespan / period + beta) micro-batches at a stage; needed where
            the cap is below D.
        lead: Among equally deep ones the j-th micro-batch of pipe p has turn j + lead * p; None takes the lowest number first.
        split: (first, last): of every pipe the first and last so many micro-batches have split backwards, the rest whole ones; None
            splits all.
    """

    w_from: float = 1.0
    shallow: bool = False
    forward_first: bool = False
    wait: float = 0.0
    wait_forward: float = 0.0
    credit: tuple[float, float] | None = None
    lead: float | None = None
    split: tuple[int, int] | None = None


def listed(problem: Problem, rule: Rule) -> tuple[Plan, float]:
    """The plan that a rule makes, and its makespan in seconds."""
    run = _Run(problem, rule)
    run.go()
    return Plan(run.out, run.fused), run.makespan


class _Run:
    """State of one pass over time."""

    def __init__(self, problem: Problem, rule: Rule) -> None:
        place, costs = problem.placement, problem.costs
        self.rule, self.stages, self.number = rule, place.num_stages, place.n_microbatches
        self.rank_of, self.pipe_of = problem.rank_of(), place.pipe_of
        self.ahead, self.back = problem.hops()
        self.forward, self.first, self.second = costs.forward, costs.input_grad, costs.weight_grad
        self.whole = [costs.full_backward(stage) for stage in range(self.stages)]
        self.holds, self.caps = problem.holds, problem.caps
        self.fused, self.turn = _fused(problem, rule), _turns(problem, rule)
        ranks = range(place.num_ranks)
        self.out: list[list[int]] = [[] for _ in ranks]
        self.forwards: list[list[int]] = [[] for _ in ranks]  # cells whose F, X or W is ready
        self.backwards: list[list[int]] = [[] for _ in ranks]
        self.weights: list[deque[int]] = [deque() for _ in ranks]
        self.coming: list[list[float]] = [[] for _ in ranks]  # heaps of the seconds at which backwards arrive
        self.busy = [False] * place.num_ranks
        self.held = [0.0] * place.num_ranks
        self.holding = [[0.0] * self.number for _ in ranks]
        self.needing = [[0.0] * self.number for _ in ranks]
        for cell, rank in enumerate(self.rank_of):
            self.needing[rank][cell // self.stages] += self.holds[cell % self.stages]
        self.flight: list[int] = []  # micro-batches on the way, oldest first
        self.open = [self.stages] * self.number  # cells of a micro-batch whose activation is not yet released
        self.credit, self.live = _credits(problem, rule), [[0] * self.stages for _ in place.pipes]
        self.events: list[tuple[float, int, int]] = []  # (seconds, 0 an operation ends / 1 data arrives / 2 look again, op)
        self.makespan = 0.0
        for pipe in range(len(place.pipes)):
            for microbatch in place.microbatches(pipe):
                cell = microbatch * self.stages
                self.forwards[self.rank_of[cell]].append(cell)

    def go(self) -> None:
        for rank in range(len(self.out)):
            self.choose(rank, 0.0)
        events = self.events
        while events:
            now = events[0][0]
            touched: list[int] = []
            while events and events[0][0] <= now + _EPS:
                _, what, op = heapq.heappop(events)
                rank = -1 - op if what == 2 else self.rank_of[op // 3]
                if what == 0:
                    self.end(rank, op, now)
                elif what == 1:
                    self.arrive(rank, op)
                touched.append(rank)
            for rank in sorted(set(touched)):
                if not self.busy[rank]:
                    self.choose(rank, now)
        assert sum(map(len, self.out)) == 3 * len(self.fused) - sum(self.fused), "the banker's check never deadlocks"

    def end(self, rank: int, op: int, now: float) -> None:
        """Books what an operation that is over releases."""
        self.busy[rank] = False
        self.makespan = max(self.makespan, now)
        cell, kind = divmod(op, 3)
        if kind == 1 and not self.fused[cell]:
            self.weights[rank].append(cell)
        if kind == 2 or (kind == 1 and self.fused[cell]):
            microbatch, stage = divmod(cell, self.stages)
            hold = self.holds[stage]
            self.held[rank] -= hold
            self.holding[rank][microbatch] -= hold
            self.live[self.pipe_of[microbatch]][stage] -= 1
            self.open[microbatch] -= 1
            if not self.open[microbatch]:
                self.flight.remove(microbatch)

    def arrive(self, rank: int, op: int) -> None:
        cell, kind = divmod(op, 3)
        if kind == 0:
            self.forwards[rank].append(cell)
        else:
            self.backwards[rank].append(cell)
            heapq.heappop(self.coming[rank])

    def choose(self, rank: int, now: float) -> None:
        """Starts the best ready operation of a free rank, if there is one."""
        rule, backwards, weights = self.rule, self.backwards[rank], self.weights[rank]
        if backwards and not rule.forward_first:
            self.run_backward(rank, now)
            return
        if weights and self.held[rank] >= rule.w_from * self.caps[rank] - 1e-6:
            self.start(rank, 3 * weights.popleft() + 2, now)
            return
        forward = self.find_forward(rank)
        if forward >= 0:
            if not backwards and self.waits(rank, rule.wait_forward * self.forward[forward % self.stages], now):
                return
            self.forwards[rank].remove(forward)
            self.start(rank, 3 * forward, now)
        elif backwards:
            self.run_backward(rank, now)
        elif weights and not self.waits(rank, rule.wait * self.second[weights[0] % self.stages], now):
            self.start(rank, 3 * weights.popleft() + 2, now)

    def waits(self, rank: int, within: float, now: float) -> bool:
        coming = self.coming[rank]
        return bool(within and coming) and coming[0] <= now + within - _EPS

    def run_backward(self, rank: int, now: float) -> None:
        backwards, stages = self.backwards[rank], self.stages
        sign, turn = (1 if self.rule.shallow else -1), self.turn
        cell = min(backwards, key=lambda cell: (sign * (cell % stages), turn[cell // stages]))
        backwards.remove(cell)
        self.start(rank, 3 * cell + 1, now)

    def find_forward(self, rank: int) -> int:
        """The deepest ready forward for which there is memory and credit; of one stage only the oldest is looked at."""
        stages, best, seen = self.stages, -1, set()
        forwards = self.forwards[rank]
        if not forwards or self.held[rank] + min(self.holds) > self.caps[rank]:
            return -1
        turn = self.turn
        for cell in sorted(forwards, key=lambda cell: (-(cell % stages), turn[cell // stages])):
            microbatch, stage = divmod(cell, stages)
            key = (stage, self.pipe_of[microbatch])
            if key in seen:
                continue
            seen.add(key)
            if self.credit is not None and self.live[key[1]][stage] >= self.credit[stage]:
                continue
            if self.safe(rank, microbatch, self.holds[stage]):
                best = cell
                break
        return best

    def safe(self, rank: int, microbatch: int, hold: float) -> bool:
        """The banker's check for one more hold."""
        free = self.caps[rank] - self.held[rank] - hold
        if free < 0:
            return False
        needing, holding, found = self.needing[rank], self.holding[rank], False
        for other in self.flight:
            if other == microbatch:
                found = True
                if needing[other] - hold > free:
                    return False
                free += holding[other] + hold
            elif needing[other] > free:
                return False
            else:
                free += holding[other]
        return found or needing[microbatch] - hold <= free

    def start(self, rank: int, op: int, now: float) -> None:
        """Starts an operation; its end and the arrival of its result are events."""
        self.busy[rank] = True
        self.out[rank].append(op)
        cell, kind = divmod(op, 3)
        microbatch, stage = divmod(cell, self.stages)
        pipe = self.pipe_of[microbatch]
        if kind == 0:
            end = now + self.forward[stage]
            hold = self.holds[stage]
            self.held[rank] += hold
            self.holding[rank][microbatch] += hold
            self.needing[rank][microbatch] -= hold
            self.live[pipe][stage] += 1
            if stage == 0:
                self.flight.append(microbatch)
            if stage < self.stages - 1:
                heapq.heappush(self.events, (end + self.ahead[pipe][stage], 1, op + 3))
            else:
                self.send_back(cell, end)
        elif kind == 1:
            end = now + (self.whole if self.fused[cell] else self.first)[stage]
            if stage:
                self.send_back(cell - 1, end + self.back[pipe][stage - 1])
        else:
            end = now + self.second[stage]
        heapq.heappush(self.events, (end, 0, op))

    def send_back(self, cell: int, when: float) -> None:
        rank = self.rank_of[cell]
        heapq.heappush(self.events, (when, 1, 3 * cell + 1))
        heapq.heappush(self.coming[rank], when)
        if self.rule.wait or self.rule.wait_forward:
            heapq.heappush(self.events, (when, 2, -1 - rank))


def _fused(problem: Problem, rule: Rule) -> list[bool]:
    """By cell, whether its backward stays whole."""
    place = problem.placement
    if not problem.split:
        return [True] * problem.num_cells
    if rule.split is None:
        return [False] * problem.num_cells
    fused = [False] * problem.num_cells
    first, last = rule.split
    for pipe in range(len(place.pipes)):
        members = place.microbatches(pipe)
        for microbatch in members[first : len(members) - last]:
            begin = microbatch * place.num_stages
            fused[begin : begin + place.num_stages] = [True] * place.num_stages
    return fused


def _turns(problem: Problem, rule: Rule) -> list[tuple[float, int]]:
    """By micro-batch, its turn among equals."""
    place = problem.placement
    turns = [(float(microbatch), microbatch) for microbatch in range(place.n_microbatches)]
    if rule.lead is not None:
        for pipe in range(len(place.pipes)):
            for index, microbatch in enumerate(place.microbatches(pipe)):
                turns[microbatch] = (index + rule.lead * pipe, microbatch)
    return turns


def _credits(problem: Problem, rule: Rule) -> list[int] | None:
    """By stage, how many of a pipe's micro-batches may be between F and the release there."""
    if rule.credit is None:
        return None
    place, costs = problem.placement, problem.costs
    alpha, beta = rule.credit
    work = [sum(seconds) for seconds in zip(costs.forward, costs.input_grad, costs.weight_grad, strict=True)]
    period = len(place.pipes) * sum(work) * problem.placement.weight_copies / len(place.pipes) / place.num_ranks
    span, found = 0.0, [0] * place.num_stages
    for stage in reversed(range(place.num_stages)):
        span += costs.forward[stage] + costs.input_grad[stage]
        lifespan = (span + costs.weight_grad[stage]) / period if period else float(place.num_ranks)  # stages may cost nothing
        found[stage] = max(1, int(alpha * lifespan + beta))
        if stage:
            span += 2 * problem.hops()[0][0][stage - 1]
    return found
