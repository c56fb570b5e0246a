"""Memory of a rank: closed forms for uniform stages, brute force for what an order holds, and sizes as text."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxchimera.errors import FxChimeraError
from fxchimera.planner.caps import caps_of, parse_bytes, readable_bytes
from fxchimera.planner.memory import Sizes, holdings, rank_memory
from fxchimera.schedule import Kind, make_order
from fxchimera_passes.balance import cut
from fxchimera_passes.captured import TensorMeta
from fxchimera_passes.errors import PartitionError
from fxchimera_passes.plan import BoundaryValue, Stage

WEIGHT, FROZEN, KEPT = 1000, 70, 10  # bytes of each stage's trained and frozen parameter, and of one micro-batch's activations


def stage(index, count, extra=()):
    """One of ``count`` equal stages with a trained and a frozen parameter, which sends eight float32 with a gradient."""
    value = BoundaryValue("h", TensorMeta((8,), (1,), torch.float32, True))
    names = (f"w{index}", f"f{index}")
    return Stage(
        index=index,
        nodes=(f"n{index}",),
        inputs=(),
        received=(value,) if index else (),
        sent=(value,) if index < count - 1 else (),
        parameters=(*names, *extra),
        buffers=(),
        owned=names,
        forward_seconds=1.0,
        backward_seconds=2.0,
        parameter_bytes=WEIGHT + FROZEN,
        activation_bytes=KEPT,
    )


def memory(order, stages, **options):
    owner = {name: s.index for s in stages for name in s.owned}
    parameters = {name: WEIGHT if name[0] == "w" else FROZEN for name in owner}
    gradients = {name: size for name, size in parameters.items() if name[0] == "w"}
    sizes = Sizes(parameters=parameters, gradients=gradients, **options)
    return rank_memory(stages, order.placement, holdings(order), owner, sizes)


def test_one_way_ranks_hold_one_stage_and_as_many_microbatches_as_follow():
    """1F1B: rank r of D holds min(N, D - r) micro-batches; AdamW two numbers for each trained one; the ends have one neighbour."""
    order = make_order("1f1b", 4, 6)
    for need in memory(order, [stage(i, 4) for i in range(4)]):
        assert (need.parameters, need.gradients, need.optimizer, need.mirrors) == (WEIGHT + FROZEN, WEIGHT, 2 * WEIGHT, 0)
        assert need.activations == KEPT * (4 - need.rank)
        # an activation received ahead and its gradient sent back, and a gradient received for what was sent
        assert need.messages == 32 * (2 * (need.rank > 0) + (need.rank < 3))
        assert need.total == 4 * WEIGHT + FROZEN + need.activations + need.messages
        assert need.in_flight == ((0, need.rank, 4 - need.rank),)


def test_two_directions_hold_a_mirror_of_the_opposite_stage():
    """Chimera at N = D: between D/2 + 1 and D micro-batches by rank (the paper's table 2), a mirror with gradients, no state."""
    order = make_order("chimera", 4, 4)
    found = memory(order, [stage(i, 4) for i in range(4)], optimizer_values=0)
    assert [need.activations // KEPT for need in found] == [3, 4, 4, 3]
    for need in found:
        assert (need.parameters, need.gradients, need.optimizer) == (WEIGHT + FROZEN, WEIGHT, 0)
        assert need.mirrors == 2 * WEIGHT + FROZEN


def test_a_tied_parameter_is_a_mirror_on_the_second_reader():
    order = make_order("gpipe", 2, 3)
    first, second = memory(order, [stage(0, 2), stage(1, 2, extra=("w0",))])
    assert (first.mirrors, second.mirrors) == (0, 2 * WEIGHT)
    assert (first.activations, second.activations) == (3 * KEPT, 3 * KEPT)


def test_buffers_count_on_every_rank_that_reads_them():
    import dataclasses

    stages = [dataclasses.replace(stage(i, 2), buffers=("mask",)) for i in range(2)]
    with_buffer = memory(make_order("1f1b", 2, 2), stages, buffers={"mask": 5})
    without = memory(make_order("1f1b", 2, 2), stages)
    assert [a.total - b.total for a, b in zip(with_buffer, without, strict=True)] == [5, 5]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["chimera", "1f1b", "gpipe", "zbv", "dualpipe", "interleaved-1f1b", "chimera-halving"]),
    st.sampled_from([2, 4]),
    st.sampled_from([8, 12]),
    st.data(),
)
def test_the_peak_is_that_of_every_moment(name, ranks, count, data):
    """Add up, at every moment of a rank's list, the bytes of all micro-batches between their F and the end of their B or W."""
    order = make_order(name, ranks, count)
    place = order.placement
    sizes = data.draw(st.lists(st.integers(0, 100), min_size=place.num_stages, max_size=place.num_stages))
    for actions, held in zip(order.ranks, holdings(order), strict=True):
        split = {(a.stage, a.microbatch) for a in actions if a.kind is Kind.W}
        moments = []
        for moment in range(len(actions)):
            done = actions[: moment + 1]
            begun = [(a.stage, a.microbatch) for a in done if a.kind is Kind.F]
            ended = {(a.stage, a.microbatch) for a in done[:-1] if a.kind in (Kind.B, Kind.W)}
            ended -= {key for key in split if not any((a.stage, a.microbatch) == key and a.kind is Kind.W for a in done[:-1])}
            moments.append(sum(sizes[s] for s, m in begun if (s, m) not in ended))
        assert held.peak(sizes) == max(moments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24GiB", 24 * 2**30), ("1.5 kB", 1500), ("512", 512), ("2 MB", 2_000_000), (".5tib", 2**39), (7, 7), (8e9, 8_000_000_000)],
)
def test_sizes_as_text(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "24 GiBs", "-1", "0", 0, -5, True, "1e9", float("nan")])
def test_sizes_that_are_none(text):
    with pytest.raises(FxChimeraError, match="memory must be"):
        parse_bytes(text)


def test_caps_by_rank():
    assert caps_of(None, 3) == ()
    assert caps_of("1KiB", 3) == (1024,) * 3
    assert caps_of(["1KiB", 5, "2kB"], 3) == (1024, 5, 2000)
    with pytest.raises(FxChimeraError, match="2 sizes for 3 ranks"):
        caps_of([1, 2], 3)


def test_readable_sizes():
    assert [readable_bytes(size) for size in (0, 1023, 1536, 3 * 2**20, 5 * 2**30, 2**41)] == [
        "0 B", "1023 B", "1.5 KiB", "3.0 MiB", "5.0 GiB", "2.0 TiB",
    ]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(3, 8))
def test_a_part_may_weigh_its_items_in_its_own_way(data, parts, n):
    """Exact against all cuts: in 1F1B an early stage holds the same layer's activations more often than a late one."""
    costs = data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    rows = data.draw(st.lists(st.lists(st.integers(0, 9), min_size=n, max_size=n), min_size=parts, max_size=parts))
    caps = data.draw(st.lists(st.integers(0, 30), min_size=parts, max_size=parts))
    fitting = []
    for inner in itertools.combinations(range(1, n), parts - 1):
        runs = list(itertools.pairwise((0, *inner, n)))
        if all(sum(row[a:b]) <= cap for (a, b), row, cap in zip(runs, rows, caps, strict=True)):
            fitting.append(max(sum(costs[a:b]) for a, b in runs))
    if not fitting:
        with pytest.raises(PartitionError):
            cut(costs, parts, sizes=rows, caps=caps)
        return
    found = cut(costs, parts, sizes=rows, caps=caps)
    assert found.bottleneck == found.bound == min(fitting)
    runs = itertools.pairwise((0, *found.positions, n))
    assert all(sum(row[a:b]) <= cap for (a, b), row, cap in zip(runs, rows, caps, strict=True))
