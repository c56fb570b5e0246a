"""The checker against an executor that knows nothing of it: random orders, and mutants of proven ones.

The executor reads torch's text, walks the ranks' lists in a random interleaving with blocking messages, and moves real payloads.
The checker must accept a list if and only if the executor ends with every computation done once, on the right data.
"""

from __future__ import annotations

import random
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from fxchimera.errors import ScheduleError
from fxchimera.schedule import (
    Order,
    Placement,
    SyncEdge,
    bidirectional,
    check,
    forward_only,
    lower,
    make_order,
    one_way,
    simulate,
)
from tests.pure.random_orders import random_costs, random_order

TEXT = re.compile(r"(\d+)([A-Z]+_?[A-Z]?)(?:([<>])(\d+)|(\d+))")


class Executor:
    """Runs lists of texts; ``fault`` says what went wrong first."""

    def __init__(self, order: Order, sync: tuple[SyncEdge, ...], *, forward: bool) -> None:
        self.pipes, self.pipe_of, self.depth = order.placement.pipes, order.placement.pipe_of, order.placement.num_stages
        self.lists = [[self.read(str(action)) for action in rank] for rank in order.ranks]
        self.at = [0] * len(self.lists)
        self.edges = {(edge.stage, edge.mirror, edge.owner) for edge in sync}
        self.forward = forward
        self.data: set[tuple] = {(rank, "F", 0, m) for rank in range(len(self.lists)) for m in range(len(self.pipe_of))}
        self.data |= {(rank, "B", self.depth - 1, m) for rank in range(len(self.lists)) for m in range(len(self.pipe_of))}
        self.done: list[tuple] = []
        self.fresh: set[tuple] = set()
        self.returned: set[tuple] = set()
        self.fault = ""

    @staticmethod
    def read(text: str) -> tuple[int, str, int]:
        stage, kind, _, peer, microbatch = TEXT.fullmatch(text).groups()
        return int(stage), kind, int(peer or microbatch)

    def rank_of(self, stage: int, microbatch: int) -> int:
        if not (0 <= stage < self.depth and microbatch < len(self.pipe_of)):
            return -1
        return self.pipes[self.pipe_of[microbatch]][stage]

    def wire(self, rank: int) -> tuple | None:
        """What a rank stands at as (source, destination, flow), or None when it computes."""
        if self.at[rank] == len(self.lists[rank]):
            return (rank, rank, "end")
        stage, kind, number = self.lists[rank][self.at[rank]]
        if "_" not in kind:
            return None
        what = kind[-1]
        if what in "PG":
            return (rank, number, what) if kind.startswith("SEND") else (number, rank, what)
        step = 1 if what == "F" else -1
        flow = (what, self.pipe_of[number] if number < len(self.pipe_of) else None)
        if kind.startswith("SEND"):
            return (rank, self.rank_of(stage + step, number), flow)
        return (self.rank_of(stage - step, number), rank, flow)

    def compute(self, rank: int) -> None:
        stage, kind, number = self.lists[rank][self.at[rank]]
        self.at[rank] += 1
        if self.rank_of(stage, number) != rank:
            self.fault = f"{stage}{kind}{number} on the wrong rank {rank}"
        needed = {
            "F": [("F", stage)],
            "B": [("B", stage), ("act", stage)],
            "I": [("B", stage), ("act", stage)],
            "W": [("gy", stage)],
        }
        if any((rank, what, where, number) not in self.data for what, where in needed[kind]):
            self.fault = f"{stage}{kind}{number} without its data"
        if any(edge[:2] == (stage, rank) and edge not in self.fresh for edge in self.edges):
            self.fault = f"{stage}{kind}{number} on stale parameters"
        if kind == "F":
            self.data |= {(rank, "act", stage, number), (rank, "out F", stage, number)}
            if self.rank_of(stage + 1, number) == rank:
                self.data.add((rank, "F", stage + 1, number))
        if kind in "BI":
            self.data |= {(rank, "gy", stage, number), (rank, "out B", stage, number)}
            if self.rank_of(stage - 1, number) == rank:
                self.data.add((rank, "B", stage - 1, number))
        self.done.append((stage, kind, number))

    def move(self, source: int, target: int) -> None:
        """Carries a payload; the receiver stores it as what it believes it to be, so a wrong one is a fault."""
        stage, kind, number = self.lists[source][self.at[source]]
        taken, _, expected = self.lists[target][self.at[target]]
        self.at[source] += 1
        self.at[target] += 1
        what = kind[-1]
        if what in "FB":
            if (taken, expected) != (stage + (1 if what == "F" else -1), number):
                self.fault = f"{stage}{kind}{number} taken for another"
            if (source, f"out {what}", stage, number) not in self.data:
                self.fault = f"{stage}{kind}{number} sent before it is computed"
            if (target, what, taken, number) in self.data:
                self.fault = f"{stage}{kind}{number} sent twice, or within a rank"
            self.data.add((target, what, taken, number))
            return
        if taken != stage:
            self.fault = f"{stage}{kind} taken for another"
        edge = (stage, target, source) if what == "P" else (stage, source, target)
        arrived = self.fresh if what == "P" else self.returned
        if edge not in self.edges or edge in arrived:
            self.fault = f"{stage}{kind} too many"
        rest = [action for action in self.lists[edge[1]][self.at[edge[1]] :] if action[0] == stage and action[1] in "BIW"]
        if what == "G" and rest:
            self.fault = f"{stage}{kind} of a part of the gradient"
        if what == "P" and any(action[0] == stage and action[1] in "FBIW" for action in self.lists[target][: self.at[target]]):
            self.fault = f"{stage}{kind} after a computation"
        arrived.add(edge)

    def run(self, chance: random.Random) -> str:
        while not self.fault:
            wires = [self.wire(rank) for rank in range(len(self.lists))]
            moves = [(rank,) for rank, wire in enumerate(wires) if wire is None]
            for source, wire in enumerate(wires):
                if wire is not None and wire[0] == source != wire[1] and 0 <= wire[1] < len(wires) and wires[wire[1]] == wire:
                    moves.append((source, wire[1]))
            if not moves:
                break
            chosen = chance.choice(moves)
            (self.compute if len(chosen) == 1 else self.move)(*chosen)
        return self.fault or self.unfinished()

    def unfinished(self) -> str:
        if any(at < len(actions) for at, actions in zip(self.at, self.lists, strict=True)):
            return "deadlock"
        cells = [(stage, m) for stage in range(self.depth) for m in range(len(self.pipe_of))]
        for stage, m in cells:
            kinds = sorted(kind for where, kind, number in self.done if (where, number) == (stage, m))
            if kinds not in ([["F"]] if self.forward else [["B", "F"], ["F", "I", "W"]]):
                return f"stage {stage}, micro-batch {m}: {kinds}"
        if self.fresh != self.edges or (not self.forward and self.returned != self.edges):
            return "exchange incomplete"
        return ""


def refused(order, sync) -> str:
    try:
        check(order, sync=sync)
    except ScheduleError as error:
        return str(error)
    return ""


PLACEMENTS = st.one_of(
    st.builds(one_way, st.integers(1, 5), st.integers(1, 6)),
    st.builds(bidirectional, st.sampled_from([2, 4, 6]), st.integers(1, 6)),
    st.builds(lambda n: Placement(4, ((0, 1, 1, 0),), (0,) * n), st.integers(1, 5)),  # V: two stages a rank, one way
    st.builds(lambda n: Placement(4, ((0, 1, 0, 1), (1, 0, 1, 0)), (0, 1) * n), st.integers(1, 3)),  # interleaved, both ways
)


def random_edges(place: Placement, chance: random.Random) -> tuple[SyncEdge, ...]:
    held = sorted({(stage, rank) for rank in range(place.num_ranks) for _, stage in place.replicas(rank)})
    edges = [SyncEdge(stage, rank, owner) for stage, rank in held for owner in range(place.num_ranks) if owner != rank]
    return tuple(edge for edge in edges if chance.random() < 0.3)


@settings(max_examples=150, deadline=None)
@given(PLACEMENTS, st.integers(0, 2**32), st.booleans())
def test_lowering_any_order_is_proven_and_runs(place, seed, split):
    chance = random.Random(seed)
    sync = random_edges(place, chance)
    compute = random_order(place, chance, split=split)
    for order, forward in ((compute, False), (forward_only(compute), True)):
        lowered = lower(order, random_costs(place.num_stages, chance), sync=sync)
        check(lowered, sync=sync)
        assert Executor(lowered, sync, forward=forward).run(chance) == ""
        bare = tuple(tuple(action for action in rank if action.kind.is_compute) for rank in lowered.ranks)
        assert bare == order.ranks
        simulate(lowered, random_costs(place.num_stages, chance))


def mutate(order: Order, chance: random.Random) -> tuple[str, Order]:
    """One fault: swap, drop, duplicate, move within a rank, move to another rank."""
    ranks = [list(rank) for rank in order.ranks]
    rank = chance.choice([rank for rank, actions in enumerate(ranks) if actions])
    actions = ranks[rank]
    kind = chance.choice(["swap", "neighbours", "drop", "duplicate", "move", "elsewhere"])
    one, two = chance.randrange(len(actions)), chance.randrange(len(actions))
    if kind == "neighbours":
        two = (one + 1) % len(actions)
    if kind in ("swap", "neighbours"):
        actions[one], actions[two] = actions[two], actions[one]
    elif kind == "duplicate":
        actions.insert(two, actions[one])
    else:
        action = actions.pop(one)
        if kind != "drop":
            target = ranks[chance.randrange(len(ranks))] if kind == "elsewhere" else actions
            target.insert(chance.randint(0, len(target)), action)
    return kind, Order(order.name, order.placement, tuple(map(tuple, ranks)))


@settings(max_examples=400, deadline=None)
@given(PLACEMENTS, st.integers(0, 2**32), st.booleans())
def test_mutants_are_refused_if_and_only_if_they_fail(place, seed, forward):
    chance = random.Random(seed)
    sync = random_edges(place, chance)
    compute = random_order(place, chance, split=True)
    order = lower(forward_only(compute) if forward else compute, sync=sync)
    for _ in range(4):
        kind, mutant = mutate(order, chance)
        fault = Executor(mutant, sync, forward=mutant.is_forward_only).run(chance)
        assert bool(fault) == bool(refused(mutant, sync)), (kind, fault, refused(mutant, sync))


def most_outstanding(order: Order, source: int, target: int, flow: str) -> int:
    """The most unused messages of a channel when its receiver dawdles: it moves only when everybody else stands still."""
    executor = Executor(order, (), forward=False)
    computing = [[action for action in actions if "_" not in action[1]] for actions in executor.lists]
    pipe, what = ("down", "up").index(flow.split("-")[0]), flow[-1]
    step = 1 if what == "F" else -1
    at, done, open_messages, most = [0] * len(computing), set(), 0, 0

    def ready(rank):
        if at[rank] == len(computing[rank]):
            return False
        stage, kind, m = computing[rank][at[rank]]
        before = stage - 1 if kind == "F" else stage + 1
        return not 0 <= before < executor.depth or (before, kind, m) in done

    while any(at[rank] < len(actions) for rank, actions in enumerate(computing)):
        movers = [rank for rank in range(len(computing)) if ready(rank)]
        rank = min(movers, key=lambda rank: rank == target)
        stage, kind, m = computing[rank][at[rank]]
        at[rank] += 1
        done.add((stage, kind, m))
        if kind == what and executor.pipe_of[m] == pipe:
            open_messages += (rank, executor.rank_of(stage + step, m)) == (source, target)
            most = max(most, open_messages)
            open_messages -= (executor.rank_of(stage - step, m), rank) == (source, target)
    return most


def test_early_messages_are_what_a_dawdling_receiver_sees():
    for schedule, depth, number in (("gpipe", 3, 4), ("1f1b", 4, 9), ("chimera", 4, 4), ("chimera", 4, 8), ("chimera", 6, 13)):
        order = lower(make_order(schedule, depth, number))
        proof = check(order)
        assert proof.early == tuple(most_outstanding(order, *channel) for channel in proof.channels)
