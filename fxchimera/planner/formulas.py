"""What a plan would cost at other sizes: formulas in batch and sequence for every stage, from some more recordings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from fxchimera.errors import FxChimeraError
from fxchimera.planner.draft import Draft
from fxchimera_passes.capture import recapture
from fxchimera_passes.captured import Captured, info
from fxchimera_passes.formula import fit
from fxchimera_passes.plan import Stage, StagePlan
from fxchimera_passes.stages import transfer
from fxchimera_passes.structure import flatten

__all__ = ["StageFormulas", "stage_formulas"]

_BATCHES = (2, 3)
_PROOF_BATCH = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFormulas:
    """One stage for one micro-batch, as formulas in its rows ``batch`` and its length ``sequence``.

    ``flops`` and ``moved_bytes`` are of the forward; ``activation_bytes`` is what it holds until its backward; ``sent_bytes`` what
    goes to the next stage.
    """

    stage: int
    flops: sympy.Expr
    moved_bytes: sympy.Expr
    activation_bytes: sympy.Expr
    sent_bytes: sympy.Expr


def stage_formulas(
    made: Draft, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, sequence: bool = False
) -> tuple[StageFormulas, ...]:
    """Record the model at several sizes, cut as in ``made``, and fit what every stage costs.

    The batch is dimension 0 of the input tensors; with ``sequence`` the length is dimension 1, and any later dimension of the same
    size.

    Raises:
        FxChimeraError: The inputs have no such dimension, or a sequence too short to vary.
        CaptureError: The model cannot be recorded at another size, or a figure is no polynomial (an expert layer, a window).
        PartitionError: The cut does not fit another size.
    """
    lengths = _lengths(args, kwargs) if sequence else (0,)
    points = [(b, s) for b in _BATCHES for s in lengths] + [(_PROOF_BATCH, 3 * max(lengths) // 4)]
    tables: list[dict[tuple[int, int], tuple[float, ...]]] = [{} for _ in made.cut.stages]
    for batch, length in points:
        new_args, new_kwargs = _resized(args, kwargs, batch, max(lengths), length)
        captured = recapture(made.captured, new_args, new_kwargs, training=made.captured.model.training)
        for stage, table in zip(_stages(made, captured).stages, tables, strict=True):
            table[batch, length] = _figures(captured, stage)
    found = []
    for number, table in enumerate(tables):
        names = ("flops", "moved_bytes", "activation_bytes", "sent_bytes")
        formulas = {
            name: fit({point: row[i] for point, row in table.items()}, _BATCHES, lengths, f"{name} of stage {number}")
            for i, name in enumerate(names)
        }
        found.append(StageFormulas(stage=number, **formulas))
    return tuple(found)


def _stages(made: Draft, captured: Captured) -> StagePlan:
    return transfer(made.captured, made.cut, captured)


def _figures(captured: Captured, stage: Stage) -> tuple[float, float, float, float]:
    names = set(stage.nodes)
    nodes = [info(node) for node in captured.graph.nodes if node.name in names]
    return (
        sum(known.forward_flops for known in nodes),
        sum(known.moved_bytes for known in nodes),
        float(stage.activation_bytes),
        float(sum(value.meta.bytes for value in stage.sent)),
    )


def _lengths(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int, int]:
    length = next((tensor.shape[1] for tensor in flatten((args, dict(kwargs)))[0] if tensor.dim() > 1), 0)
    if length < 8 or length % 4:
        raise FxChimeraError(
            f"formulas in the sequence need an input [batch, sequence, ...] whose length is a multiple of 4 and at least 8, "
            f"got {length}; ask for the batch alone otherwise"
        )
    return length // 4, length // 2, length


def _resized(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: int, length: int, new_length: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs with another number of rows and, where ``length`` is not 0, another length in its place."""
    tensors, structure = flatten((args, dict(kwargs)))
    made = []
    for tensor in tensors:
        sizes = [new_length if length and place and size == length else size for place, size in enumerate(tensor.shape)]
        made.append(_of_shape(tensor, [batch, *sizes[1:]] if sizes else sizes))
    new_args, new_kwargs = structure.rebuild(made)
    return new_args, new_kwargs


def _of_shape(tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """The values repeated, or left out, along every dimension."""
    for dim, size in enumerate(sizes):
        if size != tensor.shape[dim]:
            tensor = tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])
    return tensor
