"""What runs in the processes of the test of messages: random orders walked through over the real transport.

Every rank makes the orders from the same seeds, and goes down its own list: a send hands over a payload made from the message's
identity, a receive must bring the one that the receiver expects.  Payloads are of sizes around those at which the transport changes
its ways; a computation is a short sleep now and then.
"""

from __future__ import annotations

import queue
import random
import time

import torch

from fxchimera.errors import PipelineError
from fxchimera.runtime.failures.failure import Limits
from fxchimera.runtime.failures.position import Position
from fxchimera.runtime.message import Key
from fxchimera.runtime.messages.carriers import TransportChoice, choose_backend, process_transport
from fxchimera.runtime.processes.layout import Layout
from fxchimera.runtime.processes.world import make_world
from fxchimera.runtime.transport import Expected, Transport
from fxchimera.schedule import Placement, bidirectional, lower
from fxchimera.schedule.action import Action
from fxchimera.schedule.channel import channel, peer
from fxchimera.schedule.placement import one_way, v_shape
from fxchimera_passes.captured import TensorMeta
from tests.pure.random_orders import random_costs, random_order

__all__ = ["confuse", "walk"]

SIZES = (1, 7, 300, 20_000, 40_000)  # numbers of 4 bytes each


def walk(ranks: int, seeds: range, carrier: TransportChoice = "sockets") -> tuple[int, int]:
    """Go through one random order for each seed; return how many messages this rank received, and how many were wrong."""
    world = make_world(Layout.of(ranks, None, "compact", None, "pp"), Limits(30.0))
    placements = [_placement(ranks, random.Random(seed)) for seed in seeds]
    channels = sorted({(a, b, flow) for a in range(ranks) for b in range(ranks) if a != b for flow in FLOWS})
    world.backends = choose_backend(carrier, world)
    transport = process_transport(world.ranks[0], channels, world, None)
    try:
        found = [_walk(world.ranks[0], place, transport, seed) for place, seed in zip(placements, seeds, strict=True)]
    finally:
        world.part()
        transport.close()
        world.close()
    return sum(received for received, _ in found), sum(wrong for _, wrong in found)


FLOWS = ("down-F", "down-B", "up-F", "up-B")


def _placement(ranks: int, chance: random.Random) -> Placement:
    n = chance.randint(1, 8)
    made = [lambda: one_way(ranks, n), lambda: bidirectional(ranks, n), lambda: v_shape(ranks, n)]
    return chance.choice(made)()


def _walk(rank: int, place: Placement, transport: Transport, seed: int) -> tuple[int, int]:
    chance = random.Random(seed)
    order = lower(random_order(place, chance, split=True), random_costs(place.num_stages, chance))
    naps = random.Random(seed * 10 + rank)
    receives = [action for action in order.ranks[rank] if action.kind.is_recv and peer(action, rank, place) != rank]
    transport.post([_expected(action, rank, place, seed) for action in receives])
    received = wrong = 0
    for action in order.ranks[rank]:
        if action.kind.is_compute:
            time.sleep(naps.choice([0.0, 0.0, 0.0, 0.001]))
        elif peer(action, rank, place) != rank:
            message = _expected(action, rank, place, seed)
            if action.kind.is_recv:
                (payload,) = transport.receive(message.channel, message.key, Position(rank, action, place))
                received += 1
                wrong += payload is None or not torch.equal(payload, _payload(message.key, seed))
            else:
                transport.send(message.channel, message.key, [_payload(message.key, seed)], message.metas)
    return received, wrong


def _expected(action: Action, rank: int, place: Placement, seed: int) -> Expected:
    key = Key.of(action)
    return Expected(channel(action, rank, place), key, (TensorMeta.of(_payload(key, seed)),))


def _payload(key: Key, seed: int) -> torch.Tensor:
    """Numbers that no other message of this order, or of the next ones, has."""
    size = SIZES[hash((key.flow, key.stage, key.microbatch, seed)) % len(SIZES)]
    return torch.arange(size, dtype=torch.float32) + (key.flow * 1000 + key.stage * 100 + key.microbatch) + seed * 1e4


def confuse() -> tuple[str, str]:
    """Rank 0 sends another message than the one that rank 1 expects; return the error of either."""
    world = make_world(Layout.of(2, None, "compact", None, "pp"), Limits(30.0))
    world.backends = choose_backend("groups", world)
    line, rank = (0, 1, "down-F"), world.ranks[0]
    transport = process_transport(rank, [line], world, None)
    sent, wanted = Key(0, 1, 0), Key(0, 1, 1)
    try:
        if rank == 0:
            transport.send(line, sent, [_payload(sent, 0)], [TensorMeta.of(_payload(sent, 0))])
            world.failure.wait(queue.SimpleQueue(), "rank 0")
        transport.post([Expected(line, wanted, (TensorMeta.of(_payload(sent, 0)),))])
        try:
            transport.receive(line, wanted, "rank 1")
        except PipelineError as error:
            raise world.failure.report(world.failure.cause_at(1, str(error))).error() from error
    except PipelineError as error:
        return type(error).__name__, str(error)
    finally:
        world.part()
        transport.close()
        world.close()
    return "", ""
