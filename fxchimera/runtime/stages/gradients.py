"""How the gradients of one parameter are summed: always in the same association, whatever arrives first.

A parameter has one owner and a mirror in every other replica that reads it.  Each replica sums over its micro-batches, ascending;
then the uses of a tied parameter are added by stage, ascending; then the pipelines, down before up.  The plain reference sums in
the same order, which is what makes bitwise comparison meaningful.

Sums are made in place, as autograd does, so a gradient must have its memory for itself before anything is added to it.  What
autograd leaves need not: the gradients of ``a`` and ``b`` in ``a.view(-1) + b.view(-1)`` are two tensors on one memory.

A user's hook on a parameter expects the gradient of the batch, as one plain backward gives it.  So hooks rest while the
micro-batches run and are called once, by the owner, on the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from fxchimera_passes._torch import memory_is_shared

__all__ = ["GradientSum", "HeldHooks", "add_to_grad", "call_back", "hooked", "own_gradients", "take_gradients"]

Use = tuple[int, int]  # (pipe, stage) of the replica that read the parameter


@dataclass(slots=True)
class GradientSum:
    """The contributions to one parameter's gradient in one step, by the replica they come from."""

    parts: dict[Use, torch.Tensor] = field(default_factory=dict)

    def add(self, use: Use, gradient: torch.Tensor | None) -> None:
        """Note what one replica contributes; a second contribution of the same replica (no_sync) is added to the first."""
        if gradient is not None:
            self.parts[use] = self.parts[use] + gradient if use in self.parts else gradient

    def copy(self) -> GradientSum:
        """Return a sum that goes its own way from here."""
        return GradientSum(dict(self.parts))

    def total(self) -> torch.Tensor | None:
        """Sum the contributions in the fixed order; None when no replica had a gradient.

        The sum may be made in the memory of a contribution, so this is the last use of them.
        """
        total: torch.Tensor | None = None
        for pipe in sorted({pipe for pipe, _ in self.parts}):
            partial: torch.Tensor | None = None
            for use in sorted(use for use in self.parts if use[0] == pipe):
                partial = self.parts[use] if partial is None else _sum(partial, self.parts[use])
            assert partial is not None
            total = partial if total is None else _sum(total, partial)
        return None if total is None else _own(total)  # else ``.grad`` would keep all of a message that it came with


def _own(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clone() if memory_is_shared(gradient) else gradient


def _sum(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return ``left + right``, in the memory of ``left`` if nothing else looks at that."""
    strided = left.layout == right.layout == torch.strided
    if strided and left.dtype == right.dtype and left.shape == right.shape and not memory_is_shared(left):
        return left.add_(right)
    return left + right


class HeldHooks:
    """Takes the hooks off a parameter until ``give_back``; their handles stay valid."""

    def __init__(self, parameter: nn.Parameter) -> None:
        tables = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        self._kept = [(table, dict(table)) for table in tables if table]
        for table, _ in self._kept:
            table.clear()

    def give_back(self) -> None:
        """Put the hooks back; does nothing the second time."""
        for table, hooks in self._kept:
            table.update(hooks)
        self._kept = []


def hooked(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """Return what the user's hooks on ``parameter`` make of its gradient."""
    for hook in list((parameter._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def call_back(parameter: nn.Parameter) -> None:
    """Call the user's post-accumulate-grad hooks on ``parameter``."""
    for hook in list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(parameter)


def take_gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor | None]:
    """Remove and return the gradients that autograd left on ``parameters``."""
    taken = {}
    for name, parameter in parameters.items():
        taken[name] = parameter.grad
        parameter.grad = None
    return taken


def own_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Give the gradient of each its own memory, where it shares one."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = _own(parameter.grad)


def add_to_grad(parameter: nn.Parameter, earlier: torch.Tensor | None, total: torch.Tensor | None) -> None:
    """Set ``parameter.grad`` to what earlier steps left there plus this step's total, keeping the earlier tensor object."""
    if earlier is None or total is None:
        parameter.grad = total if earlier is None else earlier
        return
    with torch.no_grad():
        earlier.add_(total)
    parameter.grad = earlier
