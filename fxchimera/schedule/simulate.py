"""Predict when every action runs.

Ranks work through their lists.  A computation waits for its rank and its data.  A message starts when its sender reaches it,
occupies no rank and arrives after its seconds; a receive is posted when its rank reaches it and holds nobody up, the computation
that needs the data does.  A compute-only order has no messages, so data that changes rank takes the message's seconds instead.

Options: a link (an ordered pair of ranks) may carry one message at a time, the others queue behind it; and every computation may
take a random factor longer or shorter.

Times are exact for the model: events are handled in the order of their ends, ties by rank, so nothing depends on hashing.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

from fxchimera.errors import ScheduleError
from fxchimera.schedule.action import Action, Kind
from fxchimera.schedule.channel import counterpart, peer
from fxchimera.schedule.order import Order
from fxchimera.schedule.profile import Costs
from fxchimera.schedule.timeline import Event, Timeline

__all__ = ["completions", "simulate"]

_Key = tuple[int, Action]  # (rank, the RECV that brings the data); for data made on the rank itself the RECV that would have


def simulate(order: Order, costs: Costs, *, exclusive_links: bool = False, noise: float = 0.0, seed: int = 0) -> Timeline:
    """The timeline of an order, compute-only or lowered, under given costs.

    Args:
        order: What every rank does.
        costs: Seconds of every stage, bytes of every message.
        exclusive_links: A link carries the bytes of one message at a time (the latency of several may overlap).
        noise: Standard deviation of the factor on every computation's seconds; factors are normal around 1, never below 0.1.
        seed: Of the noise; one seed gives every computation the same factor in every order of the same placement.

    Raises:
        ScheduleError: The order cannot proceed; the message names the action each stuck rank waits at, and what for.
    """
    run = _Run(order, costs, exclusive=exclusive_links)
    if noise:
        run.factors = _factors(order, noise, seed)
    events = run.events()
    return Timeline(order.name, order.placement, tuple(sorted(events, key=lambda event: (event.start, event.end, event.rank))))


def completions(order: Order, costs: Costs) -> list[tuple[int, Action]]:
    """The computations of all ranks as (rank, action), in one order that respects time, data and every rank's list.

    Raises:
        ScheduleError: As :func:`simulate`.
    """
    return [(event.rank, event.action) for event in _Run(order, costs).events() if event.action.kind.is_compute]


class _Run:
    """State of one simulation."""

    def __init__(self, order: Order, costs: Costs, *, exclusive: bool = False) -> None:
        if len(costs.forward) != order.placement.num_stages:
            raise ScheduleError(f"the costs cover {len(costs.forward)} stages, the order has {order.placement.num_stages}")
        self.order, self.costs, self.place = order, costs, order.placement
        self.lowered = order.is_lowered
        self.position = [0] * len(order.ranks)
        self.posted: dict[_Key, float] = {}  # receives that their rank has reached
        self.sent: dict[_Key, Event] = {}  # messages that their sender has started
        self.ready: dict[_Key, float] = {}  # when data is there
        self.waiting: dict[_Key, int] = {}  # the rank that stands still for it
        self.running: list[tuple[float, int, float]] = []  # heap of (end, rank, start)
        self.done: set[Action] = set()
        self.factors: dict[Action, float] = {}
        self.exclusive = exclusive
        self.wire: dict[tuple[int, int], float] = {}  # when a link has carried what it was given
        self.out: list[Event] = []
        self.refresh: dict[tuple[int, int], list[_Key]] = {}
        for rank, action in order:
            if action.kind is Kind.RECV_P:
                self.refresh.setdefault((rank, action.stage), []).append((rank, action))

    def events(self) -> list[Event]:
        for rank in range(len(self.position)):
            self.advance(rank, 0.0)
        while self.running:
            end, rank, start = heapq.heappop(self.running)
            action = self.order.ranks[rank][self.position[rank]]
            self.out.append(Event(rank, action, start, end))
            self.done.add(action)
            self.position[rank] += 1
            if (made := _made(action, self.place.num_stages)) is not None:
                self.deliver(made, rank, end)
            self.advance(rank, end)
        if any(position < len(self.order.ranks[rank]) for rank, position in enumerate(self.position)):
            raise ScheduleError(self.stuck())
        return self.out

    def advance(self, rank: int, now: float) -> None:
        """Walks a rank's list up to the next computation and starts it, or notes what it waits for."""
        actions = self.order.ranks[rank]
        while self.position[rank] < len(actions):
            action = actions[self.position[rank]]
            if action.kind.is_compute:
                begin = now
                for key in self.needs(rank, action):
                    if key not in self.ready:
                        self.waiting[key] = rank
                        return
                    begin = max(begin, self.ready[key])
                seconds = self.costs.seconds(action) * self.factors.get(action, 1.0)
                heapq.heappush(self.running, (begin + seconds, rank, begin))
                return
            if action.kind.is_recv:
                self.posted[rank, action] = now
                self.arrive((rank, action), now)
            elif (source := _source(action)) is not None and not self.done.intersection(source):
                return  # sends what is not computed yet, and will not be: its own rank stands still here
            else:
                other = peer(action, rank, self.place)
                key = other, counterpart(action, rank)
                self.sent[key] = Event(rank, action, now, self.carried(action, rank, other, now))
                self.out.append(self.sent[key])
                self.arrive(key, now)
            self.position[rank] += 1

    def needs(self, rank: int, action: Action) -> Iterator[_Key]:
        """The data that a computation waits for."""
        yield from self.refresh.get((rank, action.stage), ())
        if action.kind is Kind.F and action.stage > 0:
            yield rank, Action(action.stage, Kind.RECV_F, action.microbatch)
        elif action.kind in (Kind.B, Kind.I) and action.stage < self.place.num_stages - 1:
            yield rank, Action(action.stage, Kind.RECV_B, action.microbatch)

    def deliver(self, made: Action, rank: int, now: float) -> None:
        """Hands a result on: to its own rank at once, to another rank only where no message does it."""
        other = peer(made, rank, self.place)
        if other == rank or not self.lowered:
            when = now if other == rank else self.carried(made, rank, other, now)
            self.wake((other, counterpart(made, rank)), when, now)

    def carried(self, send: Action, rank: int, other: int, now: float) -> float:
        """When a message that is sent now is there."""
        if not self.exclusive:
            return now + self.costs.message_seconds(send, rank)
        begin = max(now, self.wire.get((rank, other), 0.0))
        self.wire[rank, other] = begin + self.costs.wire_seconds(send, rank)
        return begin + self.costs.message_seconds(send, rank)

    def arrive(self, key: _Key, now: float) -> None:
        """Completes a message of which both ends have been reached."""
        if key in self.sent and key in self.posted:
            begin, end = max(self.sent[key].start, self.posted[key]), max(self.sent[key].end, self.posted[key])
            self.out.append(Event(key[0], key[1], begin, end))
            self.wake(key, end, now)

    def wake(self, key: _Key, when: float, now: float) -> None:
        self.ready[key] = when
        rank = self.waiting.pop(key, None)
        if rank is not None:
            self.advance(rank, now)

    def stuck(self) -> str:
        """Names the action every stuck rank stands at, and what it waits for."""
        lines = []
        for rank, position in enumerate(self.position):
            if position == len(self.order.ranks[rank]):
                continue
            action = self.order.ranks[rank][position]
            missing = [key[1] for key in self.needs(rank, action) if key not in self.ready] if action.kind.is_compute else []
            why = ", ".join(f"{need} (or its data made on the rank)" for need in missing) or "a computation that comes later"
            lines.append(f"rank {rank} stands at {action} and waits for {why}")
        return f"order {self.order.name!r} cannot proceed: " + "; ".join(lines)


def _factors(order: Order, noise: float, seed: int) -> dict[Action, float]:
    """Random factors, drawn in one fixed order of all possible computations."""
    place, chance = order.placement, random.Random(seed)
    return {
        Action(stage, kind, microbatch): max(0.1, chance.gauss(1.0, noise))
        for microbatch in range(place.n_microbatches)
        for stage in range(place.num_stages)
        for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
    }


def _made(action: Action, num_stages: int) -> Action | None:
    """The SEND that would carry a computation's result away; None where nothing leaves the stage."""
    if action.kind is Kind.F and action.stage < num_stages - 1:
        return Action(action.stage, Kind.SEND_F, action.microbatch)
    if action.kind in (Kind.B, Kind.I) and action.stage > 0:
        return Action(action.stage, Kind.SEND_B, action.microbatch)
    return None


def _source(send: Action) -> tuple[Action, ...] | None:
    """The computations of which one must be done before a SEND_F or SEND_B."""
    if send.microbatch is None:
        return None
    kinds = (Kind.F,) if send.kind is Kind.SEND_F else (Kind.B, Kind.I)
    return tuple(Action(send.stage, kind, send.microbatch) for kind in kinds)
