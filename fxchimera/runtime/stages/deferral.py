"""Weight gradients put off, operator by operator.

    forward   x ── detach ── x' ──┐
              │                   ├── linear ── y'      a graph of its own, made by torch
              │          weight ──┘             │
              └───────── _Deferred ──────────── y       what the stage's graph sees
    I         g arrives at _Deferred; autograd.grad(y', x', g) flows on; (y', g) is queued
    W         autograd.backward(all y', all g, inputs=weights)

No formula of our own, so kernels and bits are torch's.  The engine runs nodes from the last made to the first, in I and W as in a
whole backward: contributions to a weight that is used twice add up in the same order.  Everything else of the stage's graph is
freed by I.  A weight that is made of parameters (weight norm, one expert's of a stack) is differentiated by W too.  What this mode
does not see (a compiled module, an LSTM, a custom Function) keeps its weights' gradients in I.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.stages.operators import Operands, OperatorMode, deferrable
from fxchimera_passes._torch import apply_function, run_backward

__all__ = ["Deferral"]


class Deferral(OperatorMode):
    """Active during the forward of one micro-batch on one stage; afterwards it holds what W has to do.

    ``allowed`` are the ids of the parameters that nothing else in the stage reads; an operator is deferred when all its trainable
    parameters are among them.
    """

    def __init__(self, allowed: frozenset[int]) -> None:
        super().__init__()
        self._allowed = allowed
        self._queue: list[tuple[_Work, Tensor]] = []
        self._used: dict[int, nn.Parameter] = {}
        self._collecting = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Before I: the parameters of all deferred operators; afterwards: those that W will give gradients."""
        return list(self._used.values())

    @property
    def waiting(self) -> list[tuple[_Work, Tensor]]:
        """The operators that W will run, each with the gradient of its output."""
        return list(self._queue)

    def input_part(self, roots: list[Tensor], gradients: list[Tensor]) -> None:
        """Run a backward that leaves the deferred weight gradients out and queues them."""
        self._collecting = True
        try:
            run_backward(roots, gradients)
        finally:
            self._collecting = False
        self._used = {id(p): p for work, _ in self._queue for p in work.parameters}

    def weight_part(self) -> None:
        """Compute what was queued, add it to ``.grad`` of the parameters, and let go of the rest."""
        queue, self._queue = self._queue, []
        parameters, self._used = self.parameters, {}
        if queue:
            outputs = [work.output for work, _ in queue]
            run_backward(outputs, [gradient for _, gradient in queue], parameters)

    def queue(self, work: _Work, gradient: Tensor) -> None:
        """Keep an operator for W.

        Raises:
            FxChimeraError: The backward that asks is not this stage's.
        """
        if not self._collecting:
            raise FxChimeraError(
                "the model runs a backward of its own inside its forward, which it did not do for the first micro-batch; its "
                "weight gradients cannot be split from the input gradients: use a schedule with whole backwards, for instance "
                '"chimera"'
            )
        self._queue.append((work, gradient))

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operator, its weight gradients put off if they may be."""
        found = deferrable(func, args, kwargs, _is_deferred)
        if found is None or not all(id(parameter) in self._allowed for parameter in found.parameters):
            return func(*args, **kwargs)
        return self._deferred(func, args, kwargs, found)

    def _deferred(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], found: Operands) -> Tensor:
        leaves: list[Tensor] = []
        inputs = found.inputs
        if inputs:
            made = {id(weight) for weight in found.made}
            args = tuple(_on_leaves(value, leaves, made) for value in args)
            kwargs = {name: _on_leaves(value, leaves, made) for name, value in kwargs.items()}
        work = _Work(self, func(*args, **kwargs), leaves, found.parameters)
        self._used.update((id(parameter), parameter) for parameter in found.parameters)
        phony = None if inputs else torch.empty(0, requires_grad=True, device="cpu")
        output: Tensor = apply_function(_Deferred, work, phony, *inputs)
        return output


class _Work:
    """One deferred operator: the graph that torch made for it, from ``leaves`` and ``parameters`` to ``output``."""

    __slots__ = ("_deferral", "_leaves", "output", "parameters")

    def __init__(self, deferral: Deferral, output: Tensor, leaves: list[Tensor], parameters: list[nn.Parameter]) -> None:
        self._deferral, self.output, self._leaves, self.parameters = deferral, output, leaves, parameters

    def backward(self, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs; those of the parameters wait in the queue."""
        leaves, self._leaves = self._leaves, []
        if gradient is None:
            return (None,) * len(leaves)
        self._deferral.queue(self, gradient)
        if not leaves:
            return ()
        return run_backward([self.output], [gradient], leaves, keep_graph=True, add=False)


class _Deferred(torch.autograd.Function):
    """A deferred operator as a node of the stage's graph."""

    @staticmethod
    def forward(ctx: Any, work: _Work, phony: Tensor | None, *inputs: Tensor) -> Tensor:
        ctx.work = work
        ctx.set_materialize_grads(False)
        return work.output.data  # not a view, so the stage may write into it; nothing reads the graph's own output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override,unused-ignore]
        return (None, None, *ctx.work.backward(gradient))


def _is_deferred(node: Any) -> bool:
    return isinstance(getattr(node, "work", None), _Work)


def _on_leaves(value: Any, leaves: list[Tensor], made: Container[int]) -> Any:
    """Replace an input by a detached leaf of the operator's own graph; weights in ``made`` belong to it."""
    kind = type(value)
    if kind is Tensor and value.requires_grad and id(value) not in made:
        leaf = value.detach().requires_grad_()
        if torch.is_autocast_enabled(leaf.device.type):
            leaf = leaf.view_as(leaf)  # autocast keeps its copies of leaves to the end of the region; of views it does not
        leaves.append(leaf)
        return leaf
    if kind is list or kind is tuple:
        return kind(_on_leaves(one, leaves, made) for one in value)
    return value
