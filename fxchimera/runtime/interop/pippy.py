"""One stage as ``torch.distributed.pipelining`` calls it, and the private names of torch that running it there needs.

torch's runtime detaches what a stage sends in place, sends gradients as they come, and its gloo takes contiguous tensors only; the
stage sees to that.  The private names, ``_PipelineScheduleRuntime`` and ``_Replicate``, are those of torch 2.13.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import microbatch as torch_microbatch
from torch.distributed.pipelining import schedules as torch_schedules

from fxchimera.errors import BatchError, FxChimeraError
from fxchimera.runtime.microbatch import Batch, MicroBatch, describe
from fxchimera.schedule.files import write_csv_file
from fxchimera.schedule.order import Order
from fxchimera_passes._torch import is_view
from fxchimera_passes.captured import Captured, TensorMeta
from fxchimera_passes.keyed import microbatch_randomness
from fxchimera_passes.split import StageGraph

__all__ = ["TorchStage", "any_order", "chunk_spec", "example_tensors", "refuse_other"]


class _Entry(torch.autograd.Function):
    """Hands a tensor through, and makes its gradient contiguous: torch's split backward sends gradients as they come."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient.contiguous()


def _entered(tensor: Tensor) -> Tensor:
    """What arrives, such that its gradient can be sent."""
    entry: Tensor = _Entry.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
    return entry


def _sendable(tensor: Tensor) -> Tensor:
    """A tensor that gloo takes, and that torch may detach in place, which it may not do to a view."""
    return tensor.clone(memory_format=torch.contiguous_format) if is_view(tensor) else tensor.contiguous()


class TorchStage(nn.Module):
    """A stage of a model as torch's ``PipelineStage`` calls it; parameters have the model's own names, and are its own.

    The first stage takes those tensors of the batch that it reads, in order; a later one takes what the stage before sent, and by
    keyword (``input_2``) what it reads of the batch itself.  Returns a tuple of what it sends, or of the model's output tensors.
    """

    def __init__(self, graph: StageGraph, model: nn.Module, *, last: bool) -> None:
        super().__init__()
        bound = graph.bind(model)
        self._modules, self._parameters, self._buffers = bound._modules, bound._parameters, bound._buffers
        self.index, self.training = graph.stage.index, model.training
        self.inputs = tuple(f"input_{position}" for position in graph.stage.inputs)
        self._run, self._last = bound.forward, last

    def forward(self, *received: Tensor, **inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the stage; keywords of other stages on this rank are ignored."""
        own = [inputs[name] for name in self.inputs] if self.index else ()
        entered = map(_entered, received) if self.index else received
        sent = self._run(*entered, *own)
        return tuple(sent) if self._last else tuple(map(_sendable, sent))


def any_order(order: Order, stages: Sequence[Any], **options: Any) -> Any:
    """Torch's runtime, which runs ``order`` on this rank's ``PipelineStage`` objects.

    Raises:
        FxChimeraError: This torch has no such runtime.
    """
    found = getattr(torch_schedules, "_PipelineScheduleRuntime", None)
    if found is None:
        raise FxChimeraError(
            f"torch {torch.__version__} has no torch.distributed.pipelining.schedules._PipelineScheduleRuntime (torch 2.13 has); "
            "pass one of torch's schedule classes"
        )
    runtime = found(list(stages), order.placement.n_microbatches, **options)
    with tempfile.TemporaryDirectory() as folder:
        write_csv_file(order, path := Path(folder, "order.csv"))
        runtime._load_csv(str(path), format="compute_only")
    return runtime


def chunk_spec(dim: int | None) -> Any:
    """How torch is told to divide a tensor along ``dim``, or with None to give it whole to every micro-batch."""
    spec: Any = torch_microbatch.TensorChunkSpec
    return spec(dim) if dim is not None else torch_microbatch._Replicate()


def example_tensors(metas: Sequence[TensorMeta], device: torch.device) -> tuple[Tensor, ...]:
    """Tensors of these shapes and dtypes, contiguous as they are sent."""
    return tuple(torch.empty(meta.shape, dtype=meta.dtype, device=device).requires_grad_(meta.requires_grad) for meta in metas)


def refuse_other(batch: Batch, example: MicroBatch, captured: Captured) -> None:
    """Refuse a batch whose micro-batches do not all look like the ``example``, or take another path through the model.

    Raises:
        BatchError: The message has both shapes, or the user's line.
    """
    known = _shapes(example)
    for microbatch in batch.microbatches:
        found = _shapes(microbatch)
        if found != known or describe(microbatch.structure) != describe(example.structure):
            plain = "" if found != known else f" and {describe(microbatch.structure)}"
            example_plain = "" if found != known else f" and {describe(example.structure)}"
            raise BatchError(
                f"micro-batch {microbatch.index} has tensors {found}{plain}, the example has {known}{example_plain}: torch's "
                "schedules take micro-batches of one shape with the same plain values; fxchimera.pipeline takes any"
            )
        with microbatch_randomness(torch.initial_seed(), 0, microbatch.index):
            wrong = next((guard for guard in captured.guards if not guard.holds(microbatch.inputs)), None)
        if wrong is not None:
            raise BatchError(
                f"micro-batch {microbatch.index} takes another path through the model than the example, at {wrong.line} "
                f"({wrong.description}); fxchimera.pipeline records such paths, torch's schedules run one"
            )


def _shapes(microbatch: MicroBatch) -> list[str]:
    return [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in microbatch.inputs]
