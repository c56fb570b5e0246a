"""Whether a model may have two copies of each stage: asked before a schedule is chosen, so nothing is refused yet."""

from __future__ import annotations

from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.batches.safety import refuse_unsafe
from fxchimera.runtime.stages.clone import clone_modules
from fxchimera.runtime.stages.program import Program
from fxchimera_passes.captured import Captured
from fxchimera_passes.plan import StagePlan

__all__ = ["allows_two_copies"]


def allows_two_copies(captured: Captured, n_microbatches: int) -> bool:
    """Tell whether a second replica of each stage would compute what the first does, and can be made."""
    uncut = StagePlan(stages=(), owner={}, bottleneck_seconds=0.0, bound_seconds=0.0)
    called = {str(node.target) for node in captured.graph.nodes if node.op == "call_module"}
    try:
        refuse_unsafe(Program(captured, uncut, (), None), copies=2, n_microbatches=n_microbatches, num_processes=1)
        clone_modules(nn.Module(), captured.model, called, {})
    except FxChimeraError:
        return False
    return True
