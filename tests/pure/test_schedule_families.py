"""The families against pictures drawn by hand and against their closed forms."""

from __future__ import annotations

import collections

import pytest

from fxchimera.errors import ScheduleError
from fxchimera.schedule import Costs, Kind, bidirectional, forward_only, lower, make_order, simulate
from fxchimera.schedule.buffers import peak_activations
from fxchimera.schedule.chimera import slots

FAMILIES = ["gpipe", "1f1b", "chimera"]
EVEN = [2, 4, 6, 8, 10, 12, 14, 16]
RATIOS = [(1, 1), (1, 2), (2, 3), (10, 17), (1, 3)]  # seconds of F and B, B >= F


def staircase(picture):
    """The order that a picture in slots shows: on rank r of D, ``F0`` is stage r going down, ``f0`` stage D-1-r going up."""
    rows = [line.split() for line in picture.strip().splitlines()]
    stages = [{True: len(rows) - 1 - rank, False: rank} for rank in range(len(rows))]
    return [[f"{stages[rank][cell.islower()]}{cell.upper()}" for cell in row if cell != ".."] for rank, row in enumerate(rows)]


def test_gpipe_staircase():
    picture = """
    F0 F1 F2 .. .. .. .. B0 B1 B2
    .. F0 F1 F2 .. .. B0 B1 B2 ..
    .. .. F0 F1 F2 B0 B1 B2 .. ..
    """
    assert [list(map(str, rank)) for rank in make_order("gpipe", 3, 3).ranks] == staircase(picture)


def test_1f1b_staircase():
    picture = """
    F0 F1 F2 F3 .. .. .. B0 F4 B1 F5 B2 .. B3 .. B4 .. B5
    .. F0 F1 F2 .. .. B0 F3 B1 F4 B2 F5 B3 .. B4 .. B5 ..
    .. .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 F5 B4 .. B5 .. ..
    .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .. .. ..
    """
    assert [list(map(str, rank)) for rank in make_order("1f1b", 4, 6).ranks] == staircase(picture)


def test_chimera_staircase():
    """D=4, N=4 from the slot formula: F(j) at s+2j and B(j) at 7-s+2j; capitals down (0, 1), small letters up (2, 3)."""
    picture = """
    F0 .. F1 f2 b2 f3 b3 B0 .. B1
    .. F0 f2 F1 f3 b2 B0 b3 B1 ..
    .. f2 F0 f3 F1 B0 b2 B1 b3 ..
    f2 .. f3 F0 B0 F1 B1 b2 .. b3
    """
    assert [list(map(str, rank)) for rank in make_order("chimera", 4, 4).ranks] == staircase(picture)


def test_chimera_without_bubbles():
    """D=2: two ranks, two directions, nobody waits (paper, section 3.1)."""
    assert make_order("chimera", 2, 2).to_csv() == "0F0,1F1,1B1,0B0\n0F1,1F0,1B0,0B1\n"


@pytest.mark.parametrize("depth", [2, 4, 6, 8, 12, 16, 32])
def test_chimera_slots_never_clash(depth):
    for number in (1, depth // 2, depth, depth + 1, 2 * depth, 3 * depth - 1):
        placement = bidirectional(depth, number)
        taken = collections.Counter((placement.rank(action.stage, action.microbatch), slot) for slot, action in slots(placement))
        assert set(taken.values()) == {1}


@pytest.mark.parametrize(
    ("schedule", "depth"),
    [(schedule, depth) for schedule in FAMILIES for depth in (1, 2, 4, 6, 8)] + [("gpipe", 3), ("1f1b", 3), ("1f1b", 5)],
)
def test_counts_are_exact_for_every_n(schedule, depth):
    for number in range(1, 4 * depth + 2):
        order = make_order(schedule, depth, number)
        found = collections.Counter(str(action) for rank in order.ranks for action in rank)
        assert found == collections.Counter(f"{stage}{kind}{m}" for stage in range(depth) for kind in "FB" for m in range(number))
        assert all(len(rank) == 2 * number for rank in order.ranks)


@pytest.mark.parametrize("schedule", FAMILIES)
def test_one_stage_is_plain_alternation(schedule):
    assert make_order(schedule, 1, 3).to_csv() == "0F0,0B0,0F1,0B1,0F2,0B2\n"
    assert make_order(schedule, 1, 3).name == schedule


@pytest.mark.parametrize("depth", [3, 5, 15])
def test_chimera_refuses_odd_depths(depth):
    with pytest.raises(ScheduleError, match=f'got num_stages={depth}: .*same slot.*schedule="1f1b"'):
        make_order("chimera", depth, 4)


def test_names():
    assert make_order("Chimera", 4, 4) == make_order("chimera", 4, 4)
    with pytest.raises(ScheduleError, match=r"unknown schedule 'zigzag'.*'gpipe', '1f1b', 'chimera'.*'dualpipev', and 'auto'$"):
        make_order("zigzag", 4, 4)
    with pytest.raises(ScheduleError, match=r"'auto' is a search.*call auto\(num_ranks, n_microbatches, costs\)"):
        make_order("auto", 4, 4)
    for schedule in FAMILIES:
        with pytest.raises(ScheduleError, match="n_microbatches must be at least 1, got 0"):
            make_order(schedule, 2, 0)


def test_forward_only():
    order = forward_only(make_order("chimera", 4, 4))
    assert order.to_csv() == "0F0,0F1,3F2,3F3\n1F0,2F2,1F1,2F3\n1F2,2F0,1F3,2F1\n0F2,0F3,3F0,3F1\n"
    lowered = forward_only(lower(make_order("1f1b", 2, 1)))
    assert lowered.to_csv() == "0F0,0SEND_F0\n1RECV_F0,1F0\n"


@pytest.mark.parametrize(("forward", "backward"), RATIOS)
@pytest.mark.parametrize("depth", EVEN)
def test_closed_forms(depth, forward, backward):
    """Makespan = N(F+B) + excess; one-way (D-1)(F+B), Chimera over K units (D/2-1)((F+B) + (2K-1)(B-F))."""
    costs = Costs.uniform(depth, forward, backward)
    for units in (1, 2, 3):
        number = units * depth
        work = number * (forward + backward)
        for schedule in ("gpipe", "1f1b"):
            timeline = simulate(make_order(schedule, depth, number), costs)
            assert timeline.makespan == work + (depth - 1) * (forward + backward)
        excess = (depth // 2 - 1) * ((forward + backward) + (2 * units - 1) * (backward - forward))
        timeline = simulate(make_order("chimera", depth, number), costs)
        assert timeline.makespan == work + excess
        formula = (depth - 2) / (2 * number + depth - 2)  # the paper's table 2
        assert (timeline.bubble == pytest.approx(formula, abs=1e-12)) == (forward == backward or depth == 2)


# Makespans of the paper's schedule as an independent simulation found them: D, N -> 1F1B and Chimera at F=B=1, and at F=1, B=2.
TABLE = {
    (2, 2): (6, 9, 4, 6),
    (4, 2): (10, 15, 8, 12),
    (4, 4): (14, 21, 10, 16),
    (4, 8): (22, 33, 18, 30),
    (4, 16): (38, 57, 34, 58),
    (8, 4): (22, 33, 18, 28),
    (8, 8): (30, 45, 22, 36),
    (8, 9): (32, 48, 32, 53),
    (8, 12): (38, 57, 34, 57),
    (8, 16): (46, 69, 38, 66),
    (8, 32): (78, 117, 70, 126),
    (16, 16): (62, 93, 46, 76),
    (16, 32): (94, 141, 78, 138),
    (16, 64): (158, 237, 142, 262),
    (32, 32): (126, 189, 94, 156),
}


@pytest.mark.parametrize(("cell", "wanted"), TABLE.items(), ids=str)
def test_makespan_table(cell, wanted):
    depth, number = cell
    found = [
        simulate(make_order(schedule, depth, number), Costs.uniform(depth, 1, backward)).makespan
        for schedule in ("1f1b", "chimera")
        for backward in (1, 2)
    ]
    assert tuple(found) == wanted


@pytest.mark.parametrize("depth", EVEN)
def test_peak_activations(depth):
    """1F1B: D-r; GPipe: N; Chimera: D/2+1 at the ends to D in the middle, however many units (paper, table 2)."""
    for units in (1, 2, 3):
        number = units * depth
        assert peak_activations(make_order("1f1b", depth, number)) == tuple(depth - rank for rank in range(depth))
        assert peak_activations(make_order("gpipe", depth, number)) == (number,) * depth
        half = tuple(range(depth // 2 + 1, depth + 1))
        assert peak_activations(make_order("chimera", depth, number)) == half + half[::-1]


def test_mirror_symmetry():
    """For even N, swapping the pipes and reversing the ranks gives the same order."""
    for depth, number in ((4, 8), (6, 10), (8, 16)):
        order = make_order("chimera", depth, number)
        swapped = [
            [(action.stage, action.kind, (action.microbatch + number // 2) % number) for action in rank]
            for rank in reversed(order.ranks)
        ]
        assert swapped == [[(action.stage, action.kind, action.microbatch) for action in rank] for rank in order.ranks]
        assert all(action.kind in (Kind.F, Kind.B) for rank in order.ranks for action in rank)
