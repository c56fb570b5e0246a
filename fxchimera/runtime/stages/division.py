"""A backward divided afterwards: that of the first micro-batch, whose forward ran without knowing what may be put off.

    outputs ──> ... ──e──> operator ──> ... ──> leaves        I   from the outputs to the leaves and to the edges e; the graph stays
                              └──> weight                     W   for each operator, from its edge e to its parameters alone

The engine runs the same nodes in the same order as in a whole backward, so the bits are the same.  All activations of the stage
wait for W, which is what the proof of an order counts for every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

__all__ = ["Divisible", "Division"]


@dataclass(frozen=True, slots=True)
class Divisible:
    """An operator of the graph: the edge that leads into it, and its parameters, which nothing else reads."""

    edge: GradientEdge
    parameters: tuple[nn.Parameter, ...]


class Division:
    """The two parts of one backward; ``leaves`` are all that the graph leads to besides the operators' parameters."""

    def __init__(self, operators: Sequence[Divisible], leaves: Sequence[Tensor]) -> None:
        self._operators, self._leaves = operators, leaves
        self._queue: list[tuple[Divisible, Tensor]] = []
        self._waiting = [parameter for operator in operators for parameter in operator.parameters]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Before I: the parameters of all operators; afterwards: those that W will give gradients."""
        return list(self._waiting)

    def input_part(self, roots: list[Tensor], gradients: list[Tensor]) -> None:
        """Run the backward up to the operators' weight gradients, which are queued."""
        ends: list[Any] = [*self._leaves, *(operator.edge for operator in self._operators)]
        handles = [operator.edge.node.register_prehook(self._queueing(operator)) for operator in self._operators]
        try:
            torch.autograd.backward(roots, gradients, inputs=ends, retain_graph=True)
        finally:
            for handle in handles:
                handle.remove()
        self._operators, self._leaves = (), ()
        self._waiting = [parameter for operator, _ in self._queue for parameter in operator.parameters]

    def weight_part(self) -> None:
        """Compute what was queued, add it to ``.grad`` of the parameters, and let go of the graph."""
        queue, self._queue, self._waiting = self._queue, [], []
        for operator, gradient in queue:
            torch.autograd.backward([operator.edge], [gradient], inputs=operator.parameters)

    def _queueing(self, operator: Divisible) -> Callable[[Sequence[Tensor | None]], None]:
        def queue(gradients: Sequence[Tensor | None]) -> None:
            gradient = gradients[operator.edge.output_nr]
            if gradient is not None:
                self._queue.append((operator, gradient))

        return queue
