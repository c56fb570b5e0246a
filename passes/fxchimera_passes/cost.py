"""What the nodes of a recorded graph cost: estimated, measured, or as a formula in the batch size.

The three ways live in a file each; this is the door to them.
"""

from __future__ import annotations

from fxchimera_passes.analytic import NodeCosts, analytic
from fxchimera_passes.measure import measured, measured_stage
from fxchimera_passes.symbolic import SymbolicCosts, symbolic

__all__ = ["NodeCosts", "SymbolicCosts", "analytic", "measured", "measured_stage", "symbolic"]
