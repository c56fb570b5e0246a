"""Cuts for stages that share ranks in pairs, against all cuts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxchimera_passes.mirrored import Limit, cut_mirrored


def runs(places, n):
    return list(itertools.pairwise((0, *places, n)))


def keeps(places, n, counts, limits):
    """Whether every stage has what it needs one of, and every pair is within all its limits."""
    stages = runs(places, n)
    if any(not any(counts[a:b]) for a, b in stages):
        return False
    for number, pair in enumerate(limits):
        (a, b), (c, d) = stages[number], stages[-1 - number]
        if any(sum(one.left[a:b]) + sum(one.right[c:d]) > one.cap for one in pair):
            return False
    return True


def heaviest(places, n, seconds):
    sums = [sum(seconds[a:b]) for a, b in runs(places, n)]
    return max(map(sum, zip(sums, reversed(sums), strict=True)))


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 3]), st.integers(2, 9))
def test_the_most_even_cut_that_keeps_the_limits(data, pairs, n):
    def numbers(low, high):
        return data.draw(st.lists(st.integers(low, high), min_size=n, max_size=n))

    seconds, counts = numbers(0, 9), numbers(0, 2)
    limits = [
        [Limit(numbers(0, 9), numbers(0, 9), data.draw(st.integers(0, 50))) for _ in range(data.draw(st.integers(1, 2)))]
        for _ in range(pairs)
    ]
    every = itertools.combinations(range(1, n), 2 * pairs - 1)
    known = [heaviest(places, n, seconds) for places in every if keeps(places, n, counts, limits)]
    found = cut_mirrored(seconds, counts, limits)
    if not known:
        assert found is None
        return
    assert found is not None
    assert keeps(found, n, counts, limits)
    assert heaviest(found, n, seconds) == pytest.approx(min(known), rel=1e-3)
