"""Actions, placements and orders as values: text, CSV, digest, and what they refuse."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxchimera.errors import ScheduleError
from fxchimera.schedule import Action, Kind, Order, Placement, bidirectional, forward_only, make_order, one_way, read_csv

ROOT = Path(__file__).parents[2]
SYNC = [kind for kind in Kind if kind.value[-1] in "PG"]
PLAIN = [kind for kind in Kind if kind not in SYNC]


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, Kind.F, 0)),
        ("0B12", Action(0, Kind.B, 12)),
        ("11I3", Action(11, Kind.I, 3)),
        ("1W0", Action(1, Kind.W, 0)),
        ("3SEND_B1", Action(3, Kind.SEND_B, 1)),
        ("1RECV_F10", Action(1, Kind.RECV_F, 10)),
        ("3SEND_G>0", Action(3, Kind.SEND_G, peer=0)),
        ("3RECV_P<12", Action(3, Kind.RECV_P, peer=12)),
    ],
)
def test_action_text(text, action):
    assert str(action) == text
    assert Action.parse(text) == action
    assert Action.parse(f" {text} ") == action


@given(st.integers(0, 999), st.sampled_from(list(Kind)), st.integers(0, 999))
def test_action_round_trip(stage, kind, number):
    action = Action(stage, kind, peer=number) if kind in SYNC else Action(stage, kind, number)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "-1F0", "2F0 1F0", "3SEND_G0", "3SEND_G<0", "3RECV_P>0", "0UNSHARD", "2f0", "²F0"]
)
def test_action_refuses(text):
    with pytest.raises(ScheduleError, match="is not an action") as caught:
        Action.parse(text)
    assert repr(text) in str(caught.value)


def test_action_takes_microbatch_or_peer():
    for kind, fields in itertools.product(PLAIN, ({}, {"peer": 0}, {"microbatch": 0, "peer": 0}, {"microbatch": -1})):
        with pytest.raises(ScheduleError, match="micro-batch and no peer"):
            Action(0, kind, **fields)
    for kind, fields in itertools.product(SYNC, ({}, {"microbatch": 0}, {"microbatch": 0, "peer": 0}, {"peer": -1})):
        with pytest.raises(ScheduleError, match="peer rank and no micro-batch"):
            Action(0, kind, **fields)


def test_kind_predicates():
    assert [kind.value for kind in Kind if kind.is_compute] == ["F", "B", "I", "W"]
    assert [kind.value for kind in Kind if kind.is_send] == ["SEND_F", "SEND_B", "SEND_P", "SEND_G"]
    assert [kind.value for kind in Kind if kind.is_recv] == ["RECV_F", "RECV_B", "RECV_P", "RECV_G"]
    assert [kind.value for kind in Kind if kind.is_backward] == ["B", "I", "W"]
    assert [kind for kind in Kind if kind.is_sync] == SYNC


def test_placements():
    down = one_way(3, 2)
    assert (down.num_ranks, down.n_microbatches, down.pipes, down.pipe_of) == (3, 2, ((0, 1, 2),), (0, 0))
    both = bidirectional(4, 5)
    assert both.pipes == ((0, 1, 2, 3), (3, 2, 1, 0))
    assert (both.microbatches(0), both.microbatches(1)) == ((0, 1, 2), (3, 4))  # the first ceil(5/2) go down
    assert (both.rank(1, 0), both.rank(1, 4)) == (1, 2)
    assert both.replicas(0) == ((0, 0), (1, 3))
    assert [both.pipe_name(pipe) for pipe in (0, 1, 2, 3)] == ["down", "up", "down1", "up1"]
    assert bidirectional(4, 1) == one_way(4, 1)
    assert bidirectional(1, 7) == one_way(1, 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, ((),), (0,)), "needs a stage"),
        ((2, ((0, 1, 2),), (0,)), "places 3 stages"),
        ((2, ((0, 1), (1, 0)), (0, 0)), "every pipe 0..1 needs a micro-batch"),
        ((2, ((0, 1),), (0, 1)), "no other may be used"),
        ((2, ((0, 2),), (0,)), "ranks must be 0, 1, 2"),
    ],
)
def test_placement_refuses(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        Placement(*arguments)


@pytest.mark.parametrize("make", [one_way, bidirectional])
def test_placement_needs_numbers(make):
    with pytest.raises(ScheduleError, match="num_stages must be at least 1, got 0"):
        make(0, 1)
    with pytest.raises(ScheduleError, match="n_microbatches must be at least 1, got -2"):
        make(1, -2)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "chimera"])
@pytest.mark.parametrize(("depth", "number"), [(1, 3), (2, 1), (4, 7)])
def test_csv_round_trip(schedule, depth, number):
    order = make_order(schedule, depth, number)
    assert read_csv(order.to_csv(), order.placement, schedule) == order
    assert read_csv(order.to_csv(), order.placement, schedule).digest() == order.digest()


def test_csv_of_torch():
    """Idle cells, blanks, carriage returns, shard actions and overlapped pairs, as torch 2.13 writes them."""
    text = "0UNSHARD,0F0,,,0B0\r\n,1F0, 1I0 ,1W0,1REDUCE_GRAD\r\n"
    order = read_csv(text, one_way(2, 1))
    assert order.to_csv() == "0F0,0B0\n1F0,1I0,1W0\n"
    paired = read_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n", one_way(1, 2))
    assert paired.to_csv() == "0F0,0F1,0B0,0B1\n"


def test_csv_refuses():
    with pytest.raises(ScheduleError, match="3 lines, one a rank, and the placement 2 ranks"):
        read_csv("0F0\n1F0\n2F0\n", one_way(2, 1))
    with pytest.raises(ScheduleError, match=r"line 2, column 3 \(rank 1\): '1RESHAPE' is not an action"):
        read_csv("0F0\n1F0,1B0,1RESHAPE\n", one_way(2, 1))
    with pytest.raises(ScheduleError, match="1 lists of actions, its placement 2 ranks"):
        Order("short", one_way(2, 1), ((),))


def test_digest_covers_everything():
    order = make_order("chimera", 4, 4)
    other = [
        Order("other", order.placement, order.ranks),
        Order(order.name, order.placement, (order.ranks[0][::-1], *order.ranks[1:])),
        Order(order.name, Placement(4, order.placement.pipes, (0, 1, 0, 1)), order.ranks),
        Order(order.name, Placement(4, order.placement.pipes[::-1], order.placement.pipe_of), order.ranks),
        forward_only(order),
    ]
    assert len({order.digest(), *(one.digest() for one in other)}) == 6


def test_plans_do_not_depend_on_hash_order_and_import_no_torch():
    program = (
        "import sys; from fxchimera.schedule import *; import fxchimera.view\n"
        "order = make_order('chimera', 6, 13)\n"
        "print(lower(order, sync=[SyncEdge(s, 5 - s, s) for s in range(6)]).digest(), 'torch' in sys.modules)"
    )
    path = os.pathsep.join((str(ROOT), str(ROOT / "passes")))
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4711")
    }
    assert len(outputs) == 1
    assert outputs.pop().endswith(" False\n")
