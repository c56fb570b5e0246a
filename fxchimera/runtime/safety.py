"""Which recordings would not run right: those that write state of which two replicas, or two stages, have a copy each."""

from __future__ import annotations

from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.program import Program
from fxchimera_passes.captured import info

__all__ = ["refuse_unsafe"]

_REBUILT = {"_flat_weights", "_flat_weight_refs"}  # a recurrent layer's list of its own parameters, made anew when they change


def refuse_unsafe(program: Program, *, copies: int, num_processes: int) -> None:
    """Refuse what cannot be kept consistent; batch norm's statistics can.

    Args:
        program: A recording and its cut.
        copies: How many replicas each stage has.
        num_processes: 1 when ranks are threads.

    Raises:
        FxChimeraError: A module or buffer is written in forward where several copies of it would differ; the message names it.
    """
    model = program.captured.model
    synchronised = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if synchronised and num_processes > 1:
        raise FxChimeraError(
            f"module {synchronised[0]!r} is a SyncBatchNorm, which would wait for ranks that run other stages; use BatchNorm"
        )
    written = {name for node in program.captured.graph.nodes for name in info(node).writes}
    for name in sorted(written):
        readers = [stage.index for stage in program.plan.stages if name in stage.buffers]
        if len(readers) > 1:
            raise FxChimeraError(
                f"buffer {name!r} is written in forward and read by the stages {readers}; give each its own module"
            )
    if copies > 1:
        _refuse_second_copies(program, written)


def _refuse_second_copies(program: Program, written: set[str]) -> None:
    model = program.captured.model
    for name, changed in program.captured.report.stateful.items():
        attributes = sorted(set(changed) - _REBUILT)
        if attributes:
            raise FxChimeraError(
                f"module {name!r} ({type(model.get_submodule(name)).__name__}) changes its attributes "
                f"{attributes} in forward, which a schedule with two copies of each stage cannot keep consistent; "
                f'use schedule="1f1b", or keep that state outside the model'
            )
    for name in sorted(written - _norm_buffers(model)):
        raise FxChimeraError(
            f"buffer {name!r} is written in forward outside batch norm, which a schedule with two copies of each stage "
            'cannot keep consistent; use schedule="1f1b"'
        )


def _norm_buffers(model: nn.Module) -> set[str]:
    return {
        f"{name}.{buffer}" if name else buffer
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for buffer in module._buffers
    }
