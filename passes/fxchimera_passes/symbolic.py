"""Costs as formulas in the batch size: two recordings at two batch sizes, and a straight line through each node's two numbers.

Work per row is constant in every layer that pipelines well, so floating-point operations and moved bytes are affine in the batch
size; the planner then chooses micro-batch sizes without recording again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy
from torch import fx

from fxchimera_passes.captured import Captured, info
from fxchimera_passes.errors import CaptureError

__all__ = ["SymbolicCosts", "symbolic"]


@dataclass(frozen=True, slots=True)
class SymbolicCosts:
    """Formulas in the positive integer symbol ``batch``, by node name: floating-point operations and bytes moved, forward only."""

    batch: sympy.Symbol
    flops: Mapping[str, sympy.Expr]
    moved_bytes: Mapping[str, sympy.Expr]

    def totals(self) -> tuple[sympy.Expr, sympy.Expr]:
        """Operations and bytes of the whole forward."""
        return sympy.Add(*self.flops.values()), sympy.Add(*self.moved_bytes.values())


def symbolic(small: Captured, large: Captured) -> SymbolicCosts:
    """Fit flops and bytes of every call to ``a + b * batch`` from two recordings of the same model.

    Raises:
        CaptureError: the recordings differ in more than sizes, or the input tensors do not tell two batch sizes.
    """
    pairs = _paired(small, large)
    batch = sympy.Symbol("batch", integer=True, positive=True)
    at = _batch_sizes(pairs)
    calls = [(a, b) for a, b in pairs if a.op.startswith("call")]
    return SymbolicCosts(
        batch,
        {a.name: _line(batch, at, (info(a).forward_flops, info(b).forward_flops)) for a, b in calls},
        {a.name: _line(batch, at, (info(a).moved_bytes, info(b).moved_bytes)) for a, b in calls},
    )


def _paired(small: Captured, large: Captured) -> list[tuple[fx.Node, fx.Node]]:
    left, right = list(small.graph.nodes), list(large.graph.nodes)
    if len(left) != len(right):
        raise CaptureError(
            f"the two recordings differ: {len(left)} and {len(right)} nodes; the model's path depends on the batch size"
        )
    for a, b in zip(left, right, strict=True):
        if a.op != b.op or (a.op != "placeholder" and a.target != b.target):
            raise CaptureError(
                f"the two recordings differ at {a.name!r} ({info(a).line or 'in torch code'}): {a.target} and {b.target}; the "
                "model's path depends on the batch size"
            )
    return list(zip(left, right, strict=True))


def _batch_sizes(pairs: list[tuple[fx.Node, fx.Node]]) -> tuple[int, int]:
    found: set[tuple[int, int]] = set()
    for a, b in pairs:
        first, second = info(a).value, info(b).value
        if a.op == "placeholder" and first is not None and second is not None:
            found |= {(m, n) for m, n in zip(first.shape, second.shape, strict=False) if m != n}
    if len(found) != 1:
        raise CaptureError(f"two recordings with one differing input size are needed, the differing sizes are {sorted(found)}")
    return found.pop()


def _line(symbol: sympy.Symbol, at: tuple[int, int], values: tuple[float, float]) -> sympy.Expr:
    low, high = (sympy.nsimplify(value, rational=True) for value in values)
    slope = (high - low) / (at[1] - at[0])
    return sympy.expand(low + slope * (symbol - at[0]))
