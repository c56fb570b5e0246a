"""Which parameters may have their gradients put off: found out on the first micro-batch, which runs undivided.

A parameter that a deferred operator and something else read in the same stage would get its gradient in two pieces, summed in
another order than by one backward.  So the first micro-batch of a recording runs plainly, while a function mode notes the operators
that could be deferred; then its graph is walked, around these operators.  A parameter that is met all the same is read by something
else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxchimera.runtime.operators import OperatorMode, deferrable, operands

__all__ = ["Observation"]


class Observation(OperatorMode):
    """Active during the forward of a stage's first micro-batch; changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._inputs: dict[Any, list[Any]] = {}  # by the node of an operator: the nodes it reads besides its parameters
        self._groups: list[list[int]] = []
        self._elsewhere: set[int] = set()
        self._nested = False

    def allowed(self, outputs: Iterable[Tensor], parameters: Iterable[nn.Parameter]) -> frozenset[int]:
        """Return the ids of the parameters that only deferrable operators read."""
        if self._nested:
            return frozenset()
        mine = {id(parameter) for parameter in parameters}
        others = self._elsewhere | self._met(outputs) | {one for group in self._groups for one in group if one not in mine}
        while spoiled := [group for group in self._groups if not others.isdisjoint(group) and not others.issuperset(group)]:
            others.update(*spoiled)  # an operator is deferred with all its parameters or not at all
        return frozenset(one for group in self._groups for one in group) - others

    def _met(self, outputs: Iterable[Tensor]) -> set[int]:
        """Walk the graph around the noted operators and return the ids of the leaves that are met."""
        met: set[int] = set()
        waiting = [tensor.grad_fn for tensor in outputs if tensor.requires_grad]
        seen: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                met.add(id(leaf))
            around = self._inputs.get(node)
            waiting += [following for following, _ in node.next_functions] if around is None else around
        return met

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operator and note what it reads."""
        if func is torch.autograd.grad or func is Tensor.backward:
            self._nested = True
        found = deferrable(func, args, kwargs)
        if found is None:
            result = func(*args, **kwargs)
            if not torch.is_grad_enabled() and _holds_tensor(result):
                self._note_hidden(args, kwargs)
            return result
        inputs = [tensor.grad_fn for tensor in found.inputs]
        result = func(*args, **kwargs)
        self._inputs[result.grad_fn] = inputs
        if result._base is not None:  # a view, as of F.linear's matrix: an operator that writes it goes on from its base
            self._inputs[result._base.grad_fn] = inputs
        self._groups.append([id(parameter) for parameter in found.parameters])
        return result

    def _note_hidden(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Without gradients now, but perhaps computed again with them (reentrant checkpointing): no walk would meet these."""
        found = operands(args, kwargs)
        self._elsewhere.update(id(parameter) for parameter in (found.parameters if found is not None else ()))


def _holds_tensor(result: object) -> bool:
    return isinstance(result, Tensor) or (isinstance(result, (tuple, list)) and any(isinstance(one, Tensor) for one in result))
