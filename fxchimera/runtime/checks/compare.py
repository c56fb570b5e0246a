"""Two runs of one batch compared, tensor by tensor: how far apart they are, relative to what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fxchimera.runtime.checks.verdict import Kind, Row
from fxchimera_passes.plan import StagePlan

__all__ = ["compare_buffers", "compare_gradients", "compare_values", "distance"]

_RELATIVE = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float32: 1e-6, torch.complex64: 1e-6}
_COARSE = 5e-2  # for half precision
_FLOOR = 1e-3  # of the norm of all gradients: a gradient that is zero in theory is noise in practice


def distance(
    kind: Kind, name: str, stages: Sequence[int], found: torch.Tensor | None, wanted: torch.Tensor | None, floor: float = 0.0
) -> Row:
    """Compare what the pipeline has with what the plain model has; relative to the norm, which counts as ``floor`` at least."""
    shown = wanted if wanted is not None else found
    shape = () if shown is None else tuple(shown.shape)
    tolerance = _RELATIVE.get(shown.dtype, _COARSE) if shown is not None and _is_inexact(shown) else 0.0
    norm = 0.0 if wanted is None or not wanted.numel() else _finite_norm(_wide(wanted))
    note = _note(kind, found, wanted)
    if note:
        return Row(kind, name, tuple(stages), shape, norm, float("inf"), float("inf"), tolerance, note)
    if found is None or wanted is None or not wanted.numel():
        return Row(kind, name, tuple(stages), shape, norm, 0.0, 0.0, tolerance)
    delta = _apart(_wide(found), _wide(wanted))
    apart, scale = float(delta.norm()), max(norm, floor)
    relative = 0.0 if apart == 0.0 else apart / scale if scale else float("inf")
    return Row(kind, name, tuple(stages), shape, norm, float(delta.abs().max()), relative, tolerance)


def compare_gradients(
    plan: StagePlan, gradients: Mapping[str, torch.Tensor | None], plain: Mapping[str, torch.Tensor | None]
) -> list[Row]:
    """One row for every parameter."""
    whole = sum(float(_wide(g).norm()) ** 2 for g in plain.values() if g is not None) ** 0.5
    floor = _FLOOR * whole if whole == whole else 0.0
    rows = []
    for name, wanted in plain.items():
        readers = [stage.index for stage in plan.stages if name in stage.parameters and stage.index != plan.owner[name]]
        rows.append(distance("parameter", name, (plan.owner[name], *readers), gradients.get(name), wanted, floor))
    return rows


def compare_buffers(plan: StagePlan, buffers: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor]) -> list[Row]:
    """One row for every buffer that both have; the values after the step."""
    readers = {name: [stage.index for stage in plan.stages if name in stage.buffers] for name in buffers}
    return [distance("buffer", name, readers[name], buffers[name], plain[name]) for name in plain if name in buffers]


def compare_values(kind: Kind, name: str, stage: int, found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> Row:
    """One row for a list of tensors: the worst of them."""
    if len(found) != len(wanted):
        inf = float("inf")
        return Row(kind, name, (stage,), (), 0.0, inf, inf, 0.0, f"{len(found)} tensors, not {len(wanted)}")
    pairs = zip(found, wanted, strict=True)
    rows = [distance(kind, name, (stage,), one, other) for one, other in pairs]
    return max(rows, key=lambda row: (row.verdict == "WRONG", row.absolute), default=Row(kind, name, (stage,), (), 0, 0, 0, 0))


def _note(kind: Kind, found: torch.Tensor | None, wanted: torch.Tensor | None) -> str:
    """Say what no distance can; empty if the two can be subtracted."""
    if found is None and wanted is None:
        return ""
    what = "gradient" if kind == "parameter" else "value"
    if found is None:
        return f"no {what} in the pipeline"
    if wanted is None:
        return f"no {what} in the plain model"
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{found.dtype} {list(found.shape)} in the pipeline, {wanted.dtype} {list(wanted.shape)} in the plain model"
    sides = {"the pipeline": found, "the plain model": wanted}
    bad = [side for side, tensor in sides.items() if not bool(torch.isfinite(_wide(tensor)).all())]
    return f"not finite in {' and '.join(bad)}" if bad and kind == "parameter" else ""


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The difference; what is the same infinity, or nan, in both is no difference."""
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    return torch.where(same, torch.zeros_like(found), found - wanted)


def _finite_norm(tensor: torch.Tensor) -> float:
    return float(torch.where(torch.isfinite(tensor), tensor, torch.zeros_like(tensor)).norm())


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In double precision, and dense."""
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)
