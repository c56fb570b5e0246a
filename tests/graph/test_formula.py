"""Formulas in batch and sequence against closed forms, and refusals where there is none."""

from __future__ import annotations

import itertools

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fxchimera.errors import CaptureError, FxChimeraError
from fxchimera.planner.draft import draft
from fxchimera.planner.formulas import stage_formulas
from fxchimera.schedule import make_order
from fxchimera_passes.formula import BATCH, SEQUENCE, fit


class Attention(nn.Module):
    """One head, written out; x is [batch, sequence, width]."""

    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        query, key, value = self.query(x), self.key(x), self.value(x)
        scores = query @ key.transpose(1, 2) / 4.0
        return self.out(torch.softmax(scores, -1) @ value)


def formulas(model, *args, split_points=(), **options):
    order = make_order("1f1b", len(split_points) + 1, 2)
    return stage_formulas(draft(model, args, {}, order, split_points=split_points), args, {}, **options)


def test_an_mlp_is_affine_in_the_batch():
    """A layer of in x out: 2 in out operations a row; a row in and out and the weights are moved; ReLU keeps its result."""
    (found,) = formulas(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(6, 8))
    assert found.flops == BATCH * 2 * (8 * 32 + 32 * 4)
    layers = 4 * (BATCH * (8 + 32) + 8 * 32 + 32) + 4 * (BATCH * (32 + 4) + 32 * 4 + 4)
    assert sympy.expand(found.moved_bytes - layers - 4 * BATCH * (32 + 32)) == 0
    assert sympy.expand(found.activation_bytes - 4 * BATCH * (32 + 4)) == 0  # ReLU's result, and the output


def test_attention_is_quadratic_in_the_sequence():
    """Four projections and two products; kept are q, k, v, the softmax, its product with v, and the output."""
    (found,) = formulas(Attention(16), torch.randn(4, 8, 16), sequence=True)
    assert sympy.expand(found.flops - (4 * 2 * BATCH * SEQUENCE * 16 * 16 + 2 * 2 * BATCH * SEQUENCE**2 * 16)) == 0
    assert sympy.expand(found.activation_bytes - 4 * (BATCH * SEQUENCE**2 + 5 * BATCH * SEQUENCE * 16)) == 0


def test_stages_send_a_row_for_each_token():
    first, second = formulas(nn.Sequential(Attention(16), Attention(16)), torch.randn(4, 8, 16), split_points=["1"], sequence=True)
    assert first.sent_bytes == 4 * BATCH * SEQUENCE * 16
    assert second.sent_bytes == 0
    assert sympy.expand(first.flops - second.flops) == 0


class Triples(nn.Module):
    """Looks at all triples of tokens: cubic in the sequence."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(4, 4)

    def forward(self, x):
        x = self.weight(x)
        return torch.einsum("bid,bjd,bkd->bijk", x, x, x).sum()


def test_a_cubic_cost_is_refused():
    with pytest.raises(
        CaptureError, match="of stage 0 is no polynomial of degree 1 in the batch and 2 in the sequence: at batch 5"
    ):
        formulas(Triples(), torch.randn(4, 8, 4), sequence=True)


def test_a_sequence_too_short_is_refused():
    with pytest.raises(FxChimeraError, match="multiple of 4 and at least 8, got 6"):
        formulas(Attention(16), torch.randn(4, 6, 16), sequence=True)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-100, 100), min_size=6, max_size=6))
def test_the_coefficients_come_back(coefficients):
    expected = sum(c * BATCH**i * SEQUENCE**j for c, (i, j) in zip(coefficients, itertools.product((0, 1), (0, 1, 2)), strict=True))
    points = [*itertools.product((2, 3), (4, 8, 16)), (5, 12)]
    figures = {point: float(sympy.sympify(expected).subs(dict(zip((BATCH, SEQUENCE), point, strict=True)))) for point in points}
    assert sympy.expand(fit(figures, (2, 3), (4, 8, 16), "work") - expected) == 0
    figures[5, 12] += 1000
    with pytest.raises(CaptureError, match="work is no polynomial"):
        fit(figures, (2, 3), (4, 8, 16), "work")


def test_a_formula_is_never_left_without_a_proof():
    with pytest.raises(CaptureError, match="needs a figure to be proved on"):
        fit({(2, 0): 1.0, (3, 0): 2.0}, (2, 3), (0,), "work")
