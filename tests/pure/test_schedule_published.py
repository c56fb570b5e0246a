"""The published schedules against their formulas and the figures that others measured; F, I, W of 1/D of the model unless said."""

from __future__ import annotations

import pytest

from fxchimera.errors import ScheduleError
from fxchimera.schedule import Costs, Kind, certify, check, lower, make_order, schedules, simulate
from fxchimera.schedule.chimera import chimera, chimera_doubling
from fxchimera.schedule.continuous import continuous
from fxchimera.schedule.interleaved import interleaved_one_f_one_b
from fxchimera.schedule.zbv import zbv

EVEN = [2, 4, 8, 16]


def stages(depth, forward=1.0, first=1.0, second=1.0, latency=0.0):
    return Costs(forward=(forward,) * depth, input_grad=(first,) * depth, weight_grad=(second,) * depth, latency=latency)


def figures(order, *seconds):
    """Bubble with a barrier, span bubble, peak."""
    found = certify(order, stages(order.placement.num_ranks, *seconds).refined(order.placement.chunks))
    return found.bubble, found.span_bubble, max(found.peak_activations)


@pytest.mark.parametrize("units", [1, 2, 4])
@pytest.mark.parametrize("depth", EVEN)
def test_one_copy_formulas(depth, units):
    """Interleaved (D-1)(F+B)/2; ZB-H1 (D-1)(F+I-W) at peak D; ZBV (D-1)F/2 at peak D, no span bubble for N >= 2D."""
    number = units * depth
    bubble, _, _ = figures(make_order("interleaved-1f1b", depth, number))
    assert bubble == pytest.approx((depth - 1) * 1.5)
    for seconds in ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8)):
        bubble, _, peak = figures(make_order("zb-h1", depth, number), *seconds)
        assert (bubble, peak) == (pytest.approx((depth - 1) * (1 + seconds[1] - seconds[2])), depth)
    bubble, span, peak = figures(make_order("zbv", depth, number))
    assert (bubble, peak) == (pytest.approx((depth - 1) / 2), depth)
    assert units == 1 or span == pytest.approx(0.0)


@pytest.mark.parametrize("depth", [4, 6, 8, 12, 16])
def test_v_half_holds_half(depth):
    """D/2+1 activations, for every N >= D."""
    assert [figures(make_order("v-half", depth, number))[2] for number in (depth, 2 * depth + 1)] == [depth / 2 + 1] * 2


def test_interleaved_peak():
    """Measured by others at D=8, v=2: 8 for N=8, 11.5 above."""
    assert [figures(make_order("interleaved-1f1b", 8, number))[2] for number in (8, 16, 32)] == [8.0, 11.5, 11.5]


@pytest.mark.parametrize("units", [2, 3, 4])
@pytest.mark.parametrize("depth", EVEN)
def test_dualpipe_formulas(depth, units):
    """With F and B one after the other: (D/2-1)F at peak D+1, and (D-1)F/2 at peak D+1/2."""
    bubble, _, peak = figures(make_order("dualpipe", depth, units * depth))
    assert (bubble, peak) == (pytest.approx(depth // 2 - 1), depth + 1)
    bubble, _, peak = figures(make_order("dualpipev", depth, units * depth))
    assert (bubble, peak) == (pytest.approx((depth - 1) / 2), depth + 0.5)


def blocks(order):
    """Each rank's actions in blocks: a forward that a full backward follows at once is one block with it.

    But for the first such pair of the middle rank, which is published as two.
    """
    for actions in order.ranks:
        rows, pairs = [], 0
        for action in actions:
            if action.kind is Kind.B and rows and [before.kind for before in rows[-1]] == [Kind.F]:
                pairs += 1
                if pairs > 1 or action.stage not in (order.placement.num_stages // 2, order.placement.num_stages // 2 - 1):
                    rows[-1].append(action)
                    continue
            rows.append([action])
        yield rows


def atomic(order, seconds):
    """Makespan of the blocks: a block starts when all its data is there, and all its results are there at its end."""
    end, stages = {}, order.placement.num_stages
    while True:
        before, free = dict(end), []
        for rows in blocks(order):
            free.append(0.0)
            for row in rows:
                sources = [
                    (action.stage + (-1 if action.kind is Kind.F else 1), action.kind is Kind.F, action.microbatch)
                    for action in row
                    if action.kind is not Kind.W
                ]
                free[-1] = max([free[-1], *(end.get(source, 0.0) for source in sources if 0 <= source[0] < stages)])
                free[-1] += sum(seconds[action.kind] for action in row)
                end |= {(a.stage, a.kind is Kind.F, a.microbatch): free[-1] for a in row if a.kind is not Kind.W}
        if end == before:
            return max(free)


@pytest.mark.parametrize(("depth", "both", "one"), [(4, 2.0, 3.0), (8, 6.0, 7.0)])
def test_dualpipe_with_atomic_blocks(depth, both, one):
    """DeepSeek's (D/2-1)(F&B + B - 3W) where F&B takes F + B: 2 and 6; folded, (D-1)(...) in halves: 3 and 7."""
    for name, share, wanted in (("dualpipe", 1.0, both), ("dualpipev", 0.5, one)):
        seconds = {Kind.F: share, Kind.B: 2 * share, Kind.I: share, Kind.W: share}
        assert atomic(make_order(name, depth, 2 * depth), seconds) - 6 * depth == pytest.approx(wanted)


# Measured by an independent simulation at D=8: name, N, (F, I, W), latency -> bubble with a barrier.
MEASURED = [
    ("gpipe", 16, (1, 1, 1), 0.0, 21),
    ("1f1b", 16, (1, 1, 1), 0.0, 21),
    ("interleaved-1f1b", 16, (1, 1, 1), 0.0, 10.5),
    ("zb-h1", 32, (1, 1, 1), 0.0, 7),
    ("zbv", 8, (1, 1, 1), 0.0, 3.5),
    ("v-half", 8, (1, 1, 1), 0.0, 8.5),
    ("v-half", 16, (1, 1, 1), 0.0, 8.5),
    ("v-half", 32, (1, 1, 1), 0.0, 8.5),
    ("chimera", 16, (1, 1, 1), 0.0, 18),
    ("chimera", 32, (1, 1, 1), 0.0, 30),
    ("chimera", 16, (1, 1.2, 0.8), 0.1, 21.1),
    ("chimera", 16, (1, 1.2, 0.8), 0.2, 24.2),
    ("zb-h1", 16, (1, 1.2, 0.8), 0.1, 12.6),
    ("zb-h1", 16, (1, 1.2, 0.8), 0.2, 15.4),
    ("dualpipe", 16, (1, 1, 1), 0.1, 4.7),
    ("dualpipe", 32, (1, 1.2, 0.8), 0.1, 5.9),
    ("dualpipe", 16, (1, 1.2, 0.8), 0.2, 7.8),
    ("dualpipev", 16, (1, 1.2, 0.8), 0.1, 9.3),
    ("dualpipev", 16, (1, 1.2, 0.8), 0.2, 13.5),
]


@pytest.mark.parametrize(("name", "number", "seconds", "latency", "bubble"), MEASURED)
def test_measured_bubbles(name, number, seconds, latency, bubble):
    assert figures(make_order(name, 8, number), *seconds, latency)[0] == pytest.approx(bubble)


def test_zbv_of_its_own_costs():
    """The greedy rule shown the true costs: 7.5 at latency 0.1, 10.4 at 0.2 (D=8, F 1, I 1.2, W 0.8), as measured by others."""
    for latency, bubble in ((0.1, 7.5), (0.2, 10.4)):
        order = zbv(8, 16, (0.5, 0.6, 0.4), latency)
        assert figures(order, 1, 1.2, 0.8, latency)[0] == pytest.approx(bubble)


def test_splits():
    """Split backwards at D=8, N=16 as others counted them: DualPipe 44 of 128, DualPipeV 92 of 256, ZBV all."""
    found = [certify(order, Costs.uniform(order.placement.num_stages)).splits for order in all_of("dualpipe", "dualpipev", "zbv")]
    assert found == [44, 92, 256]


def all_of(*names):
    return [make_order(name, 8, 16) for name in names]


@pytest.mark.parametrize("backward", [1, 2, 3])
@pytest.mark.parametrize("depth", EVEN)
def test_chimera_variants(depth, backward):
    """Doubling over U units of 2D: (D/2-1)((1+B) + (2U-2)max(0, B-2)); one unit of 2f pipes: 2(D/2f-1)B, peak D-D/2f+1..D."""
    costs = Costs.uniform(depth, 1, backward)
    for units in (1, 2, 3):
        number = 2 * units * depth
        excess = (depth / 2 - 1) * (1 + backward + (2 * units - 2) * max(0, backward - 2))
        assert simulate(chimera_doubling(depth, number), costs).makespan == number * (1 + backward) + excess
    for pairs in (1, 2, 4, 8):
        if depth // 2 % pairs == 0:
            order = chimera(depth, depth, pairs)
            found = certify(order, costs)
            assert found.bubble == 2 * (depth // 2 // pairs - 1) * backward
            assert (min(found.peak_activations), max(found.peak_activations)) == (depth - depth // 2 // pairs + 1, depth)
            assert found.weight_copies == 2 * pairs


def test_chimera_refuses_pairs():
    with pytest.raises(ScheduleError, match="pairs=3 must divide half of the number of stages, which is 8/2"):
        chimera(8, 8, 3)


@pytest.mark.parametrize(("depth", "excess"), [(4, 3), (8, 11), (16, 28)])
def test_continuous(depth, excess):
    """At B = 2F the excess does not grow with N; with a window of D/2 the order costs what direct concatenation does."""
    costs = Costs.uniform(depth, 1, 2)
    for number in (2 * depth, 4 * depth, 8 * depth):
        assert simulate(continuous(depth, number), costs).makespan == 3 * number + excess
        assert max(certify(continuous(depth, number), costs).peak_activations) == depth + 1
        direct = simulate(chimera(depth, number), costs).makespan
        assert simulate(continuous(depth, number, cap=depth // 2), costs).makespan == direct


def test_continuous_between_units():
    """D=8, B=2F: 15 at N=9 (direct 26), 12 at N=12 (direct 21)."""
    found = [simulate(continuous(8, number), Costs.uniform(8)).makespan - 3 * number for number in (9, 12)]
    assert found == [15, 12]


@pytest.mark.parametrize("name", ["dualpipe", "dualpipev"])
def test_dualpipe_refuses(name):
    with pytest.raises(
        ScheduleError, match=rf'{name} needs .* at least 2\*D; got num_stages=4, n_microbatches=7; use schedule="auto"'
    ):
        make_order(name, 4, 7)


@pytest.mark.parametrize("name", sorted(schedules()))
def test_every_family_is_proven(name):
    """A spread of (D, N), N below D and remainders among them; three chunks for the interleaved one."""
    proven = 0
    for depth in (1, 2, 3, 4, 6, 8):
        for number in (1, 2, 3, 5, 8, 13, 16):
            try:
                order = make_order(name, depth, number)
            except ScheduleError:
                continue
            check(lower(order))
            proven += 1
    assert proven >= 8
    if name == "interleaved-1f1b":
        check(lower(interleaved_one_f_one_b(4, 7, 3)))
