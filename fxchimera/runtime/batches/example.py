"""The micro-batch that is recorded at wrap: of several pipelines, pipeline 0's, so that all have the same recording and cut."""

from __future__ import annotations

from dataclasses import replace

from fxchimera.errors import BatchError
from fxchimera.runtime.microbatch import Batch
from fxchimera.runtime.processes.world import World

__all__ = ["common_example"]


def common_example(batch: Batch, world: World) -> Batch:
    """Collective: return ``batch`` with the tensors of pipeline 0's first micro-batch in its own first one.

    Shards may have any number of rows, and so may the example batches that are their first ones.

    Raises:
        BatchError: The pipelines pass other arguments, or ones of other kinds.
    """
    if world.grid.width == 1:
        return batch
    first, *others = batch.microbatches
    tensors = world.spread([tensor.detach() if tensor.is_meta else tensor.detach().cpu() for tensor in first.inputs], "pipeline()")
    kinds = [[(tensor.dtype, tensor.dim()) for tensor in side] for side in (first.inputs, tensors)]
    if kinds[0] != kinds[1]:
        raise BatchError(
            f"the example batch of pipeline {world.grid.pipeline} holds tensors of the dtypes and dimensions {kinds[0]}, but that "
            f"of pipeline 0 {kinds[1]}; every pipeline must pass the same arguments, with any number of rows"
        )
    placed = [tensor.to(own.device).requires_grad_(own.requires_grad) for tensor, own in zip(tensors, first.inputs, strict=True)]
    return replace(batch, microbatches=(replace(first, inputs=tuple(placed)), *others))
