"""The partitioners that ours is compared with keep what their papers promise; several slacks at once are as good as one by one."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxchimera_passes.balance import cut, cuts

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COSTS = st.lists(st.integers(1, 20).map(float), min_size=4, max_size=9)


@pytest.fixture(scope="module")
def partitioners():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("partitioners", BENCHMARKS / "partitioners.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


def loads(costs, inner):
    return [sum(costs[a:b]) for a, b in itertools.pairwise((0, *inner, len(costs)))]


def least(costs, parts):
    return min(max(loads(costs, inner)) for inner in itertools.combinations(range(1, len(costs)), parts - 1))


@given(COSTS, st.integers(2, 4))
def test_blocks_differ_by_one_element_at_most(partitioners, costs, parts):
    """Barany and Grolmusz, theorem 1."""
    found = loads(costs, partitioners.block(costs, parts))
    assert max(found) - min(found) <= max(costs)


@given(COSTS, st.integers(2, 4))
def test_probing_is_within_its_accuracy_and_never_below_the_least(partitioners, costs, parts):
    inner = partitioners.probing(costs, parts)
    assert least(costs, parts) <= max(loads(costs, inner)) <= 1.001 * least(costs, parts)
    assert partitioners.heaviest(costs, inner) == pytest.approx(max(loads(costs, inner)) * parts / sum(costs))


def test_uniform_numbers(partitioners):
    assert partitioners.uniform(10, 4) == [3, 6, 8]
    assert partitioners.uniform(8, 2) == [4]


@given(COSTS, st.integers(2, 4), st.data())
def test_several_slacks_at_once(costs, parts, data):
    n = len(costs)
    crossing = data.draw(st.lists(st.integers(0, 9), min_size=n + 1, max_size=n + 1))
    slacks = (0.05, 0.0, 0.5)
    found = cuts(costs, parts, slacks, crossing=crossing, counts=[1] * n)
    assert found == tuple(cut(costs, parts, crossing=crossing, counts=[1] * n, slack=slack) for slack in slacks)
