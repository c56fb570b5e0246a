"""Is the loss one that a pipeline can train by?

It is tried on tensors without values before anything is sent, so that a wrong loss_fn is refused on the host; what it draws at
random is noticed and gets names.  And it must depend on the model's output alone: a parameter that loss_fn reads by itself lives on
another rank, and only part of its gradient would count.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.batches.loss import LossFn, loss_of, place_of
from fxchimera_passes._torch import OpOverload, TorchDispatchMode, new_fake_mode
from fxchimera_passes.capture.hostdraws import HostDraws
from fxchimera_passes.capture.state import generators_untouched
from fxchimera_passes.captured import Captured, RandomKey, info
from fxchimera_passes.keyed import HOST_ORDINAL, is_random, keyed_random
from fxchimera_passes.structure import flatten

__all__ = ["check_loss", "refuse_other_leaves", "with_named_draws"]

_NAME = "<loss>"  # of what draws, in keys; no module is called so


def with_named_draws(loss_fn: LossFn | None, keys: Collection[RandomKey]) -> LossFn | None:
    """Make a loss that draws what the micro-batch and ``keys`` say, on whatever rank and thread it is computed."""
    if loss_fn is None or not keys:
        return loss_fn

    @functools.wraps(loss_fn, updated=())
    def named(*args: Any) -> torch.Tensor:
        with keyed_random(tuple(keys)):
            return loss_fn(*args)

    return named


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices random operators, and draws from Python's and numpy's generators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._random, self.host = False, HostDraws()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._random |= is_random(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def keys(self) -> tuple[RandomKey, ...]:
        """Name what was drawn."""
        host = (RandomKey(_NAME, 0, HOST_ORDINAL),) if self.host.moved() else ()
        return (*host, RandomKey(_NAME, 0, 0)) if self._random else host


def check_loss(captured: Captured, target: Any, loss_fn: LossFn | None) -> tuple[RandomKey, ...]:
    """Compute the loss of fake outputs; returns the names of what it draws at random.

    A loss that needs values cannot be tried this way and is left to the run, which checks it again.

    Raises:
        FxChimeraError: ``loss_fn`` does not return a scalar, or the model's output holds no loss.
    """
    output_node = next(node for node in reversed(captured.graph.nodes) if node.op == "output")
    metas = [info(node).value for node in output_node.args[0]]
    if any(meta is None for meta in metas):
        return ()
    targets, structure = flatten(target)
    fakes = new_fake_mode()
    with generators_untouched():
        draws = _Draws()
        try:
            with fakes, torch.no_grad():
                outputs = [torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype) for meta in metas if meta is not None]
                fake_target = structure.rebuild([fakes.from_tensor(tensor) for tensor in targets])
                with draws, draws.host.noticing():
                    loss_of(captured.out_structure.rebuild(outputs), fake_target, loss_fn)
        except FxChimeraError:
            raise
        except Exception:  # not the loss's shape: it needs values, or has a mistake that the run reports with its traceback
            pass
        return draws.keys() if loss_fn is not None else ()


def refuse_other_leaves(
    loss: torch.Tensor, outputs: Sequence[torch.Tensor], ends: Sequence[Node | None], loss_fn: LossFn, model: nn.Module
) -> None:
    """Refuse a loss that requires gradients of anything but the model's outputs.

    Args:
        loss: The loss of one micro-batch.
        outputs: The model's output tensors.
        ends: Their ``grad_fn`` before the loss was computed, where the search in its graph ends.
        loss_fn: What computed it, for the error.
        model: Its parameters' names are used in the error.

    Raises:
        FxChimeraError: The message names the parameter, if it is the model's, or gives its shape.
    """
    allowed = {id(tensor) for tensor in outputs}
    seen: set[Node | None] = {None, *ends}
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in allowed:
            name = next((name for name, parameter in model.named_parameters() if parameter is leaf), None)
            what = (
                f"the parameter {name!r}" if name is not None else f"a tensor of shape {tuple(leaf.shape)} that requires a gradient"
            )
            raise FxChimeraError(
                f"loss_fn {place_of(loss_fn)} reads {what} by itself; parameters live on several ranks, so only part of its "
                "gradient would count. Compute that term in the model's forward and return it, or use the optimizer's weight_decay"
            )
