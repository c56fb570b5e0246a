"""Which recordings would not run right: those that write state of which two replicas, or two stages, have a copy each."""

from __future__ import annotations

from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.stages.program import Program
from fxchimera_passes.captured import info

__all__ = ["refuse_unsafe"]

_REBUILT = {"_flat_weights", "_flat_weight_refs"}  # a recurrent layer's list of its own parameters, made anew when they change


def refuse_unsafe(
    program: Program, *, copies: int, n_microbatches: int, num_processes: int, in_turn: bool = True, width: int = 1
) -> None:
    """Refuse what cannot be kept consistent; batch norm's statistics can.

    Args:
        program: A recording and its cut.
        copies: How many replicas of each stage get micro-batches.
        n_microbatches: N; from 2 on several are in flight.
        num_processes: 1 when ranks are threads.
        in_turn: Every stage runs the forwards of its micro-batches in ascending order.
        width: The number of pipelines.

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
        assert len(readers) < 2, f"buffer {name!r} is written in forward, so its readers are in one stage, not in {readers}"
    _refuse_carried(program, n_microbatches)
    if copies > 1:
        _refuse_second_copies(program, written, "a schedule with two copies of each stage", 'use schedule="1f1b", or ')
    elif width > 1:
        _refuse_second_copies(program, written, f"data_parallel={width} with its copies of each stage", "")
    elif not in_turn:
        _refuse_out_of_turn(program, written)


def _refuse_carried(program: Program, n_microbatches: int) -> None:
    """Refuse tensors that one forward leaves in an attribute for the next, where the next would not find them as in a plain loop.

    A tensor with autograd history has no right meaning there: the plain loop's next backward runs into the graph of the last
    forward, which is gone.  A detached one is right in a stage of one copy, which sees the micro-batches in order.
    """
    model, report = program.captured.model, program.captured.report
    if "" in report.carried:
        raise FxChimeraError(
            f"the forward of {type(model).__name__} itself keeps {', '.join(report.carried[''])} for its next call, which a step "
            "of the pipeline would not do; keep the tensor in a buffer (register_buffer), or read and set it in a submodule"
        )
    for name, attributes in report.attached.items() if n_microbatches > 1 else ():
        raise FxChimeraError(
            f"module {name!r} ({type(model.get_submodule(name)).__name__}) keeps {', '.join(attributes)} for its next call "
            f"together with its autograd graph, into which the backward of another micro-batch would run; keep it detached "
            f"(self.{attributes[0]} = value.detach()), or use n_microbatches=1"
        )


def _refuse_out_of_turn(program: Program, written: set[str]) -> None:
    found = [f"buffer {name!r}" for name in sorted(written)]
    found += [f"attribute {attributes[0]!r} of module {name!r}" for name, attributes in _stateful(program)]
    if found:
        raise FxChimeraError(
            f"{found[0]} is written in forward, but the order runs the forwards of a stage out of turn, so that a micro-batch "
            'would find what a later one wrote; number the micro-batches of every stage in ascending order, or use schedule="1f1b"'
        )


def _stateful(program: Program) -> list[tuple[str, list[str]]]:
    """The modules that change Python attributes in forward, with those."""
    found = [(name, sorted(set(changed) - _REBUILT)) for name, changed in program.captured.report.stateful.items()]
    return [(name, attributes) for name, attributes in found if attributes]


def _refuse_second_copies(program: Program, written: set[str], where: str, advice: str) -> None:
    model = program.captured.model
    for name, attributes in _stateful(program):
        raise FxChimeraError(
            f"module {name!r} ({type(model.get_submodule(name)).__name__}) changes its attributes "
            f"{attributes} in forward, which {where} cannot keep consistent; {advice}keep that state outside the model"
        )
    norms = _norm_buffers(model)
    read = {str(node.target) for node in program.captured.graph.nodes if node.op == "get_attr"}
    for name in sorted(written & norms & read):
        raise FxChimeraError(
            f"the running statistics {name!r} are read outside their layer, where {where} has not put them together yet; "
            f"{advice}read them after the step"
        )
    for name in sorted(written - norms):
        raise FxChimeraError(
            f"buffer {name!r} is written in forward outside batch norm, which {where} cannot keep consistent; "
            f"{advice}write it outside the model"
        )


def _norm_buffers(model: nn.Module) -> set[str]:
    return {
        f"{name}.{buffer}" if name else buffer
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for buffer in module._buffers
    }
