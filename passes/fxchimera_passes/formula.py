"""Formulas in batch and sequence length: a polynomial through figures of several recordings, proved on one more.

                    sequence  L/4   L/2    L            checks: every other figure, for instance at (5, 3L/4)
    batch 2                    .     .     .
    batch 3                    .     .     .

Work and memory are affine in the batch (rows do not know of each other) and at most quadratic in the sequence (attention).  That
is assumed to choose the form, never believed: a figure that the formula misses is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import sympy

from fxchimera_passes.errors import CaptureError

__all__ = ["BATCH", "SEQUENCE", "fit"]

BATCH = sympy.Symbol("batch", integer=True, positive=True)
"""Rows of a micro-batch."""
SEQUENCE = sympy.Symbol("sequence", integer=True, positive=True)
"""Tokens of a row."""

_Point = tuple[int, int]
_TOLERANCE = 1e-9


def fit(figures: Mapping[_Point, float], batches: Sequence[int], sequences: Sequence[int], what: str) -> sympy.Expr:
    """Return the polynomial of least degree in each symbol through the figures at ``batches`` times ``sequences``.

    Args:
        figures: A figure for each (batch, sequence) of the grid, and for at least one point more.
        batches: Distinct batch sizes; n of them give degree n - 1 at most.
        sequences: Distinct lengths; a single one gives a formula without the sequence.
        what: Name of the figure, for the error.

    Raises:
        CaptureError: No further point is there to prove the formula, or it misses one.
    """
    rows = [_interpolated(sequences, [Fraction(figures[b, s]) for s in sequences]) for b in batches]
    terms = []
    for power, column in enumerate(zip(*rows, strict=True)):
        for degree, coefficient in enumerate(_interpolated(batches, column)):
            terms.append(sympy.Rational(coefficient.numerator, coefficient.denominator) * BATCH**degree * SEQUENCE**power)
    formula = sympy.Add(*terms)
    grid = {(b, s) for b in batches for s in sequences}
    checks = [(point, figure) for point, figure in figures.items() if point not in grid]
    if not checks:
        raise CaptureError(f"{what}: a formula needs a figure to be proved on, beside the {len(grid)} it is made from")
    for (batch, sequence), figure in checks:
        predicted = float(formula.subs({BATCH: batch, SEQUENCE: sequence}))
        if abs(predicted - figure) > _TOLERANCE * max(abs(figure), 1.0):
            raise CaptureError(
                f"{what} is no polynomial of degree {len(batches) - 1} in the batch and {len(sequences) - 1} in the sequence: at "
                f"batch {batch}, sequence {sequence} it is {figure:g}, and the formula {formula} gives {predicted:g}"
            )
    return formula


def _interpolated(places: Sequence[int], values: Sequence[Fraction]) -> list[Fraction]:
    """Coefficients, constant first, of the polynomial with these values at these places (Newton's divided differences)."""
    differences = list(values)
    for order in range(1, len(places)):
        for i in range(len(places) - 1, order - 1, -1):
            differences[i] = (differences[i] - differences[i - 1]) / (places[i] - places[i - order])
    coefficients = [Fraction(0)] * len(places)
    for place, difference in zip(reversed(places), reversed(differences), strict=True):
        coefficients = [Fraction(0), *coefficients[:-1]]  # times the symbol
        shifted = [*coefficients[1:], Fraction(0)]
        coefficients = [c - place * s for c, s in zip(coefficients, shifted, strict=True)]
        coefficients[0] += difference
    return coefficients
