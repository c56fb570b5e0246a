"""The errors that end a capture, and the checks that no later rule could make."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from fxchimera_passes._torch import hooks_of
from fxchimera_passes.capture.lines import line_of
from fxchimera_passes.captured import Captured, info
from fxchimera_passes.errors import CaptureError

__all__ = ["check_model", "failing", "refuse_seeding", "unrecordable"]


def check_model(model: nn.Module) -> None:
    """Check that ``model`` can be called as a stage would call it.

    Raises:
        CaptureError: it has parameters without a shape, or backward hooks of its own.
    """
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise CaptureError(
            f"{len(lazy)} parameters of {type(model).__name__} have no shape yet, {lazy[0]!r} first: run one forward of the model "
            "before it is wrapped"
        )
    if hooks_of(model)[1]:
        raise CaptureError(
            f"{type(model).__name__} itself has backward hooks, which no stage could call: register them on its submodules"
        )


def unrecordable(model: nn.Module, line: str, reason: str) -> CaptureError:
    """Say that the forward of ``model`` itself cannot be recorded."""
    if not line:
        return CaptureError(
            f"{type(model).__name__}.forward cannot be recorded: in torch's own code, {reason}. Mend the batch or the model"
        )
    return CaptureError(
        f"{type(model).__name__}.forward cannot be recorded at {line}: {reason}. "
        "Move the branch or the computation around this line into a submodule: a submodule is kept as one whole call."
    )


def failing(model: nn.Module, error: Exception) -> CaptureError:
    """Say that ``model``, run on real tensors as it is, raised ``error``."""
    return CaptureError(
        f"{type(model).__name__}.forward fails {_place(model, error)} on this batch, also when it is run as it is: "
        f"{type(error).__name__}: {str(error).strip()}. Mend the batch or the model"
    )


def _place(model: nn.Module, error: BaseException) -> str:
    """The user's line that ``error`` came from, and the innermost of the model's modules."""
    names, found = {id(module): name for name, module in model.named_modules()}, ""
    trace = error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if names.get(id(module)):
            found = f"in module {names[id(module)]!r} ({type(module).__name__})"
        trace = trace.tb_next
    line = line_of(error)
    return ", ".join(filter(None, (f"at {line}" if line else "", found))) or "in torch's own code"


def refuse_seeding(captured: Captured, calls: Sequence[str]) -> None:
    """Refuse a forward that draws at random and handled torch's generator in ``calls`` ("function() at file:line").

    Raises:
        CaptureError: it does both.
    """
    if calls and any(info(node).random for node in captured.graph.nodes):
        raise CaptureError(
            f"the forward of {type(captured.model).__name__} calls {calls[0]}, so as to know the random numbers that follow. In a "
            "pipeline every random operation draws from a key of its own (seed, step, micro-batch, module) and not from "
            "torch's generator, so a backward that repeats them would get others and its gradients would be wrong. Let "
            "torch.utils.checkpoint repeat that part of the forward, or let it draw nothing (dropout 0)"
        )
