"""A proof with blocking messages covers the weaker modes: buffered channels of every size, and a stream for every channel.

Two small executors that know nothing of the checker run proven orders in random interleavings.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxchimera.errors import ScheduleError
from fxchimera.schedule import channel, check, counterpart, lower, make_order, schedules
from tests.pure.test_schedule_exhaustive import edges
from tests.pure.test_schedule_oracle import PLACEMENTS, random_costs, random_order


def buffered(order, size, chance):
    """Ranks work through their lists; a send waits only for one of ``size`` places on its channel; returns the ranks left over."""
    queues, at = defaultdict(deque), [0] * len(order.ranks)

    def step(rank):
        action = order.ranks[rank][at[rank]]
        if not action.kind.is_compute:
            queue = queues[channel(action, rank, order.placement)]
            if action.kind.is_send:
                if len(queue) == size:
                    return False
                queue.append(counterpart(action, rank))
            else:
                if not queue:
                    return False
                assert queue.popleft() == action, "the message of another"
        at[rank] += 1
        return True

    while moving := [rank for rank, actions in enumerate(order.ranks) if at[rank] < len(actions)]:
        chance.shuffle(moving)
        if not any(step(rank) for rank in moving):
            return moving
    assert not any(queues.values())
    return []


def streams(order, chance):
    """Computations of a rank, and each end of each channel, are lists of their own; returns the lists left over.

    A computation waits for its data, a send for the computations before it in the rank's list, a receive for nothing but its
    message: it may be posted as early as one likes.
    """
    lists, done = defaultdict(list), [0] * len(order.ranks)
    arrived, queues, needs = set(), defaultdict(deque), {}
    for rank, actions in enumerate(order.ranks):
        computed, received = 0, []
        for action in actions:
            key = (rank, "compute") if action.kind.is_compute else (rank, *channel(action, rank, order.placement))
            lists[key].append(action)
            if action.kind.is_compute:
                needs[rank, action] = (0, tuple(received))
                computed, received = computed + 1, []
            elif action.kind.is_send:
                needs[rank, action] = (computed, ())
            else:
                received.append((rank, action))
    at = dict.fromkeys(lists, 0)

    def step(key):
        rank, action = key[0], lists[key][at[key]]
        if action.kind.is_recv:
            if not queues[key[1:]]:
                return False
            assert queues[key[1:]].popleft() == action, "the message of another"
            arrived.add((rank, action))
        else:
            before, data = needs[rank, action]
            if done[rank] < before or not arrived.issuperset(data):
                return False
            if action.kind.is_send:
                queues[key[1:]].append(counterpart(action, rank))
            else:
                done[rank] += 1
        at[key] += 1
        return True

    while moving := [key for key, actions in lists.items() if at[key] < len(actions)]:
        chance.shuffle(moving)
        if not any(step(key) for key in moving):
            return moving
    return []


def runs_everywhere(order, chance):
    for size in range(1, 9):
        assert buffered(order, size, chance) == []
    for _ in range(3):
        assert streams(order, chance) == []


@settings(max_examples=60, deadline=None)
@given(PLACEMENTS, st.integers(0, 2**32), st.booleans())
def test_proven_orders_run_in_weaker_modes(place, seed, split):
    chance = random.Random(seed)
    order = lower(random_order(place, chance, split=split), random_costs(place.num_stages, chance), sync=edges(place))
    check(order, sync=edges(place))
    runs_everywhere(order, chance)


@pytest.mark.parametrize("name", sorted(schedules()))
def test_families_run_in_weaker_modes(name):
    chance = random.Random(name)
    for depth, number in ((3, 5), (4, 8)):
        try:
            order = make_order(name, depth, number)
        except ScheduleError:
            continue
        runs_everywhere(lower(order, sync=edges(order.placement)), chance)
