"""Try the loss on tensors without values before anything is sent, so that a wrong loss_fn is refused on the host."""

from __future__ import annotations

from typing import Any

import torch

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.loss import LossFn, loss_of
from fxchimera_passes._torch import new_fake_mode
from fxchimera_passes.captured import Captured, info
from fxchimera_passes.structure import flatten

__all__ = ["check_loss"]


def check_loss(captured: Captured, target: Any, loss_fn: LossFn | None) -> None:
    """Compute the loss of fake outputs.

    A loss that needs values cannot be tried this way and is left to the run, which checks it again.

    Raises:
        FxChimeraError: ``loss_fn`` does not return a scalar, or the model's output holds no loss.
    """
    output_node = next(node for node in reversed(captured.graph.nodes) if node.op == "output")
    metas = [info(node).value for node in output_node.args[0]]
    if any(meta is None for meta in metas):
        return
    targets, structure = flatten(target)
    fakes = new_fake_mode()
    try:
        with fakes, torch.no_grad():
            outputs = [torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype) for meta in metas if meta is not None]
            fake_target = structure.rebuild([fakes.from_tensor(tensor) for tensor in targets])
            loss_of(captured.out_structure.rebuild(outputs), fake_target, loss_fn)
    except FxChimeraError:
        raise
    except Exception:  # not the loss's shape: it needs values, or has a mistake that the run reports with its traceback
        return
