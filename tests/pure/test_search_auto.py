"""The search against proven bounds, against the published orders, and against the figures it has to reach."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fxchimera.errors import ScheduleError
from fxchimera.schedule import Costs, Kind, Limits, auto, certify, check, lower, make_order, schedules, simulate
from fxchimera.schedule.cache import store

ROOT = Path(__file__).parents[2]


def uneven(depth, forward=1.0, first=1.2, second=0.8, latency=0.0):
    return Costs(forward=(forward,) * depth, input_grad=(first,) * depth, weight_grad=(second,) * depth, latency=latency)


def sound(found, depth, number, peak):
    """The order is proven, holds no more than allowed, and the certificate says what the simulator says."""
    proof = check(lower(found.order, found.costs))
    chunks = found.order.placement.chunks
    assert max(proof.peak_activations) <= peak * chunks
    assert max(found.certificate.peak_activations) == max(proof.peak_activations) / chunks
    assert simulate(found.order, found.costs).makespan == pytest.approx(found.certificate.makespan)
    assert found.certificate.lower_bound <= found.certificate.makespan
    assert found.any_shape.seconds <= found.certificate.lower_bound + 1e-9
    assert found.certificate.messages == proof.messages
    return found.certificate


CELLS = [(depth, number) for depth in (2, 4, 6, 8, 12, 16) for number in (depth, depth + 1, 2 * depth, 3 * depth - 1, 4 * depth)]


@pytest.mark.parametrize(("depth", "number"), CELLS)
def test_free_communication_is_optimal(depth, number):
    """F = I = W = 1, latency 0, peak D: the bubble is the bound of every order with two copies, (ceil(D/2)-1)F/v."""
    shapes = [("bidirectional", 1)] if depth > 8 and number > 2 * depth else [("bidirectional", 1), ("bidirectional-v", 2)]
    for shape, chunks in shapes:
        found = auto(depth, number, Costs.uniform(depth), Limits(peak=depth, shapes=(shape,)))
        wanted = (-(-depth // 2) - 1) / chunks
        assert found.certificate.bubble == pytest.approx(wanted, abs=1e-9)
        assert found.certificate.gap == 0.0
        if depth <= 8:
            sound(found, depth, number, depth)


@pytest.mark.parametrize(
    ("latency", "peak", "number", "bubble"),
    [(0.05, 8, 16, 4.3), (0.1, 8, 8, 5.0), (0.1, 8, 32, 5.0), (0.2, 8, 16, 6.6), (0.1, 9, 16, 4.4), (0.2, 9, 32, 5.9)],
)
def test_latency(latency, peak, number, bubble):
    """D=8, F 1, I 1.2, W 0.8: the bubbles asked of the thorough search, within 15 % at peak 9, from the default one."""
    costs = uneven(8, latency=latency)
    found = auto(8, number, costs, Limits(peak=peak, shapes=("bidirectional",)))
    assert sound(found, 8, number, peak).bubble <= bubble
    below_peers(costs, number, peak, found)


def below_peers(costs, number, peak, found):
    """Strictly below every published order of at most this peak and four copies or fewer, DualPipe at peak 9 too."""
    for name in schedules():
        if name == "chimera-4":
            continue
        try:
            order = make_order(name, 8, number)
        except ScheduleError:
            continue
        peer = certify(order, costs.refined(order.placement.chunks))
        if max(peer.peak_activations) <= peak or name in ("dualpipe", "dualpipev"):
            assert found.certificate.makespan < peer.makespan


def test_never_worse_than_a_family():
    """Uneven stages, any N, little and much memory: no published order within the limits is better."""
    depth = 4
    costs = Costs(forward=(1.0, 0.7, 1.3, 2.0), input_grad=(1.1, 0.8, 1.2, 2.0), weight_grad=(0.9, 0.5, 1.0, 2.5), latency=0.15)
    for number in (1, 2, 5, 8):
        for peak in (1, 2, 4, 4.5, 5, None):
            for split in (False, True):
                found = auto(depth, number, costs, Limits(peak=peak, split=split), seconds=0.05)
                assert split or not any(action.kind is Kind.I for _, action in found.order)
                for name in schedules():
                    try:
                        order = make_order(name, depth, number)
                    except ScheduleError:
                        continue
                    own = costs.refined(order.placement.chunks)
                    peer = certify(order, own)
                    allowed = peak is None or max(peer.peak_activations) <= peak
                    if allowed and peer.weight_copies <= 2 and (split or not peer.splits):
                        assert found.certificate.makespan <= peer.makespan + 1e-9


@pytest.mark.parametrize(
    ("number", "price", "shape", "bubble"),
    [
        (8, 0.05, "bidirectional", 3.75),
        (8, 0.1, "bidirectional", 4.3),
        (8, 0.05, "bidirectional-v", 1.95),
        (8, 0.1, "bidirectional-v", 2.3),
        (16, 0.1, "bidirectional", 4.9),
        (16, 0.1, "bidirectional-v", 3.7),
        (32, 0.1, "bidirectional-v", 4.9),
    ],
)
def test_priced_splits(number, price, shape, bubble):
    """F = I = W = 1, 8 activations: bubbles, the price included, that a research search reached in minutes."""
    found = auto(8, number, Costs.uniform(8).with_split_price(price), Limits(peak=8, shapes=(shape,)))
    assert sound(found, 8, number, 8).bubble <= bubble + 1e-9


def test_price_of_splitting():
    """DualPipe at its own peak is never beaten by it, whatever the price of a split (D=8, N=16, latency 0.1)."""
    for price in (0.0, 0.05, 0.1):
        costs = uneven(8, latency=0.1).with_split_price(price)
        found = auto(8, 16, costs, Limits(peak=9, shapes=("bidirectional",)))
        peer = certify(make_order("dualpipe", 8, 16), costs)
        assert sound(found, 8, 16, 9).bubble < peer.bubble
        assert found.certificate.splits < 128


def test_odd_depths_and_few_microbatches():
    for depth, number in ((1, 1), (1, 5), (3, 1), (3, 2), (5, 4), (5, 9), (7, 3)):
        found = auto(depth, number, Costs.uniform(depth, latency=0.1), Limits(peak=depth), seconds=0.05)
        sound(found, depth, number, depth)


def test_bytes():
    """A capacity in bytes with uneven stages: the held bytes stay below it on every rank."""
    size = (30.0, 10.0, 10.0, 50.0)
    limits = Limits(capacity=(120.0, 60.0, 60.0, 120.0), activation_bytes=size, chunks=1)
    found = auto(4, 9, Costs.uniform(4), limits, seconds=0.1)
    for rank, actions in enumerate(found.order.ranks):
        held = 0.0
        for action in actions:
            held += {Kind.F: 1, Kind.W: -1, Kind.B: -1, Kind.I: 0}[action.kind] * size[action.stage]
            assert held <= limits.capacity[rank]
    check(lower(found.order))


def test_limits_are_explained():
    costs = Costs.uniform(4)
    with pytest.raises(ScheduleError, match=r"rank 0 may hold 0.5, and one micro-batch alone needs 1 there; raise the cap"):
        auto(4, 4, costs, Limits(peak=0.5))
    with pytest.raises(ScheduleError, match=r"no shape of .*'one-way', 'bidirectional'"):
        auto(4, 4, costs, Limits(shapes=("zigzag",)))
    with pytest.raises(ScheduleError, match="cover 4 stages, and there are 8 ranks"):
        auto(8, 4, costs)
    with pytest.raises(ScheduleError, match=r'"default" or "thorough", got \'best\''):
        auto(4, 4, costs, search="best")
    with pytest.raises(ScheduleError, match="needs activation_bytes"):
        auto(4, 4, costs, Limits(capacity=(1.0,) * 4))


@pytest.mark.parametrize(
    ("ranks", "number", "capacity", "sizes", "split"),
    [
        (6, 8, 0.6, (0.6, 0.6, 0.3, 0.6, 0.6, 0.6), True),
        (3, 5, 1.0, (0.3, 1.0, 0.6), True),
        (4, 8, 1.0, (1.0, 0.3, 0.6, 1.0), False),
    ],
)
def test_a_capacity_that_sums_of_fractions_reach_exactly(ranks, number, capacity, sizes, split):
    """0.3 + 0.6 - 0.6 is more than 0.3 in floating point, and no order may get stuck for that."""
    limits = Limits(capacity=(capacity,) * ranks, activation_bytes=sizes, shapes=("bidirectional-v",), split=split)
    found = auto(ranks, number, Costs.uniform(ranks), limits, seconds=0.001)
    check(lower(found.order))


def test_same_order_for_every_hash_seed():
    program = (
        "from fxchimera.schedule import *\n"
        "costs = Costs(forward=(1.0,) * 6, input_grad=(1.2,) * 6, weight_grad=(0.8,) * 6, latency=0.1).with_split_price(0.05)\n"
        "print(auto(6, 7, costs, Limits(peak=6), seconds=0.2).order.digest())"
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


def test_cache(tmp_path):
    """The second search reads the first one's order; a file that is wrong in any way is a miss, and so are other costs."""
    costs = uneven(4, latency=0.1)
    ask = {"search": "thorough", "seconds": 0.1, "cache": tmp_path}
    first = auto(4, 6, costs, Limits(peak=4), **ask)
    (stored,) = tmp_path.iterdir()
    again = auto(4, 6, costs, Limits(peak=4), **ask)
    assert (again.order, again.certificate) == (first.order, first.certificate)
    good = stored.read_text()
    last = first.order.ranks[0][-1]
    for text in ("", "{", good.replace(str(last), "0F0"), good.replace('"csv"', '"cvs"'), "[" * 100_000):
        stored.write_text(text)
        assert auto(4, 6, costs, Limits(peak=4), **ask).order == first.order
        assert stored.read_text() == good
    swapped = make_order("gpipe", 4, 6)  # a valid order that needs more memory than allowed
    store(tmp_path, stored.stem, "one-way", swapped)
    assert auto(4, 6, costs, Limits(peak=4), **ask).order == first.order
    assert auto(4, 6, uneven(4, latency=0.1000000001), Limits(peak=4), **ask).order == first.order
    assert len(list(tmp_path.iterdir())) == 1
    auto(4, 6, uneven(4, latency=0.11), Limits(peak=4), **ask)
    assert len(list(tmp_path.iterdir())) == 2
