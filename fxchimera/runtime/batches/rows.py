"""Is the first dimension of an output the batch?  Micro-batches' outputs are put together along it.

An output of another layout, [time, batch, ...], most often shows by its shape: it has not as many rows as the micro-batch.  Where
by chance it has, a second recording with one row more tells which dimension grows.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from fxchimera.errors import BatchError
from fxchimera.runtime.microbatch import MicroBatch
from fxchimera.runtime.stages.program import Program
from fxchimera_passes.capture import recapture
from fxchimera_passes.captured import Captured, TensorMeta, info
from fxchimera_passes.errors import CaptureError

__all__ = ["OutputRows"]


class OutputRows:
    """Remembers of which recordings the outputs have been looked at."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Program, str] = weakref.WeakKeyDictionary()

    def check(self, program: Program, microbatch: MicroBatch, dims: Sequence[int | None]) -> None:
        """Refuse to merge outputs of ``program`` whose first dimension only looks like the batch.

        Args:
            program: The recording that fits the micro-batch.
            microbatch: One of at least two.
            dims: Along which dimension each of its tensors was divided.

        Raises:
            BatchError: The message names the output and the dimension that is the batch.
        """
        if program not in self._known:
            self._known[program] = _fault(program.captured, microbatch, dims)
        if self._known[program]:
            raise BatchError(self._known[program])


def _fault(captured: Captured, microbatch: MicroBatch, dims: Sequence[int | None]) -> str:
    before = _outputs(captured)
    doubtful = [
        place for place, meta in before.items() if meta.shape[:1] == (microbatch.rows,) and microbatch.rows in meta.shape[1:]
    ]
    if not doubtful:
        return ""
    longer = [_longer(tensor, dim) for tensor, dim in zip(microbatch.inputs, dims, strict=True)]
    args, kwargs = microbatch.structure.rebuild(longer)
    try:
        after = _outputs(recapture(captured, args, kwargs, training=captured.model.training))
    except CaptureError:  # the model takes one size only
        return ""
    for place in doubtful:
        shape, other = before[place].shape, after[place].shape if place in after else ()
        grown = [dim for dim, (old, new) in enumerate(zip(shape, other, strict=False)) if new != old]
        if len(shape) == len(other) and grown and grown[0] != 0:
            return (
                f"output tensor {place} has shape {tuple(shape)} for {microbatch.rows} rows, but its batch is dimension "
                f"{grown[0]}: with one row more the shape is {tuple(other)}. Return tensors whose first dimension is the batch"
            )
    return ""


def _outputs(captured: Captured) -> dict[int, TensorMeta]:
    output = next(node for node in reversed(captured.graph.nodes) if node.op == "output")
    metas = [info(node).value for node in output.args[0]]
    return {place: meta for place, meta in enumerate(metas) if meta is not None}


def _longer(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    return tensor if dim is None else torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim)
