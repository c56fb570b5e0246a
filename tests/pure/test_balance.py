"""The balancer against brute force over all cuts."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxchimera_passes.balance import cut, most_parts
from fxchimera_passes.errors import PartitionError


def brute_force(costs, parts, *, allowed, counts, min_count, sizes, caps, crossing, slack):
    """All legal cuts: the least bottleneck, and the (bytes, bottleneck) pairs within the slack of it."""
    legal = []
    for inner in itertools.combinations(allowed, parts - 1):
        edges = (0, *inner, len(costs))
        runs = list(itertools.pairwise(edges))
        if any(sum(counts[a:b]) < min_count for a, b in runs):
            continue
        if caps is not None and any(sum(sizes[a:b]) > cap for (a, b), cap in zip(runs, caps, strict=True)):
            continue
        legal.append((sum(crossing[p] for p in inner), max(sum(costs[a:b]) for a, b in runs)))
    if not legal:
        return None
    best = min(bottleneck for _, bottleneck in legal)
    return best, min(pair for pair in legal if pair[1] <= int(best * (1 + slack)))


@st.composite
def problems(draw):
    n = draw(st.integers(1, 10))
    integers = st.integers(0, 20)

    def row(values, length=n):
        return draw(st.lists(values, min_size=length, max_size=length))

    parts = draw(st.integers(1, 4))
    return {
        "costs": row(integers),
        "parts": parts,
        "allowed": sorted(draw(st.sets(st.integers(1, n - 1)))) if n > 1 else [],
        "crossing": row(integers, n + 1),
        "counts": row(st.integers(0, 2)),
        "min_count": draw(st.integers(0, 2)),
        "sizes": row(integers),
        "caps": draw(st.none() | st.lists(st.integers(5, 80), min_size=parts, max_size=parts)),
        "slack": draw(st.sampled_from([0.0, 0.1, 0.5])),
    }


@settings(max_examples=600, deadline=None)
@given(problems())
def test_every_cut_is_optimal(problem):
    costs, parts = problem.pop("costs"), problem.pop("parts")
    expected = brute_force(costs, parts, **problem)
    if expected is None:
        with pytest.raises(PartitionError):
            cut(costs, parts, **problem)
        return
    found = cut(costs, parts, **problem)
    edges = (0, *found.positions, len(costs))
    runs = list(itertools.pairwise(edges))
    assert len(runs) == parts
    assert all(a < b and sum(problem["counts"][a:b]) >= problem["min_count"] for a, b in runs)
    assert set(found.positions) <= set(problem["allowed"])
    assert found.bound == expected[0]
    sent = sum(problem["crossing"][p] for p in found.positions)
    assert (sent, found.bottleneck) == expected[1]
    assert found.bottleneck == max(sum(costs[a:b]) for a, b in runs)


@pytest.mark.parametrize(
    ("costs", "parts", "bottleneck"),
    [([1, 1, 1, 1, 1], 4, 2), ([1, 1, 1, 1], 4, 1), ([100, 1, 1, 1], 4, 100), ([1, 1, 1, 100], 4, 100), ([0, 0, 0, 0], 4, 0)],
)
def test_no_part_is_empty(costs, parts, bottleneck):
    # DeepSpeed PR 4312: partition_balanced([1, 1, 1, 1, 1], 4) gave sizes 2, 2, 1, 0
    found = cut(costs, parts)
    assert all(a < b for a, b in itertools.pairwise((0, *found.positions, len(costs))))
    assert found.bottleneck == found.bound == bottleneck


@pytest.mark.parametrize(("n", "parts"), [(3, 4), (1, 2)])
def test_too_few_items_names_both_numbers(n, parts):
    with pytest.raises(PartitionError, match=rf"at most {n} parts.*{parts} were asked"):
        cut([1.0] * n, parts)


def test_too_tight_caps_are_named():
    with pytest.raises(PartitionError, match="do not fit"):
        cut([1.0, 1.0], 2, sizes=[10, 10], caps=[5, 20])


@given(
    st.lists(st.floats(0, 1e9, allow_subnormal=False), min_size=3, max_size=9),
    st.integers(1, 3),
    st.sampled_from([1e-12, 1e-3, 1.0]),
)
def test_fractions_of_seconds(costs, parts, unit):
    costs = [cost * unit for cost in costs]
    expected = min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *inner, len(costs))))
        for inner in itertools.combinations(range(1, len(costs)), parts - 1)
    )
    assert cut(costs, parts).bottleneck == pytest.approx(expected, rel=1e-9, abs=1e-30)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.data())
def test_most_parts_is_the_largest_feasible_number(counts, data):
    n = len(counts)
    allowed = sorted(data.draw(st.sets(st.integers(1, n - 1)))) if n > 1 else []
    best = 0
    for size in range(n):
        for inner in itertools.combinations(allowed, size):
            if all(sum(counts[a:b]) >= 1 for a, b in itertools.pairwise((0, *inner, n))):
                best = max(best, size + 1)
    assert most_parts(n, allowed, counts) == best


def test_a_hundred_thousand_items_within_a_second():
    numbers = np.random.default_rng(0)
    costs = numbers.exponential(size=100_000)
    crossing = numbers.integers(1, 1000, size=100_001)
    counts = numbers.integers(0, 2, size=100_000)
    began = time.process_time()
    found = cut(costs, 8, crossing=crossing, counts=counts, slack=0.01)
    assert time.process_time() - began < 1.0
    assert found.bound >= costs.sum() / 8
    assert found.bottleneck <= 1.01 * found.bound
