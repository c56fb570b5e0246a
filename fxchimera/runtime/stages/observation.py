"""Which parameters may have their gradients put off: found out on the first micro-batch, whose forward runs as usual.

A parameter that a deferred operator and something else read in the same stage would get its gradient in two pieces, summed in
another order than by one backward.  So the first micro-batch of a recording runs plainly, while a function mode notes the operators
that could be deferred; then its graph is walked, around these operators.  A parameter that is met all the same is read by something
else.  The graph is then divided afterwards (``division``), as far as no two operators share a parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fxchimera.runtime.stages.division import Divisible, Division
from fxchimera.runtime.stages.entry import Entry
from fxchimera.runtime.stages.operators import OperatorMode, deferrable, operands

__all__ = ["Observation"]


@dataclass(frozen=True, slots=True)
class _Noted:
    """A call that could be deferred: the nodes it added to the graph, the edge into it, its parameters, the nodes it reads."""

    nodes: tuple[Any, ...]
    edge: GradientEdge
    parameters: tuple[nn.Parameter, ...]
    inputs: list[Any]

    @property
    def ids(self) -> set[int]:
        return {id(parameter) for parameter in self.parameters}


class Observation(OperatorMode):
    """Active during the forward of a stage's first micro-batch; changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[_Noted] = []
        self._by_node: dict[Any, _Noted] = {}
        self._elsewhere: set[int] = set()
        self._hooked: set[Any] = set()  # nodes whose results have hooks
        self._nested = False

    def allowed(self, outputs: Iterable[Tensor], parameters: Iterable[nn.Parameter]) -> frozenset[int]:
        """Return the ids of the parameters that only deferrable operators read."""
        if self._nested:
            return frozenset()
        mine, groups = {id(parameter) for parameter in parameters}, [call.ids for call in self._noted]
        others = self._walk(outputs, self._by_node).met | {one for group in groups for one in group if one not in mine}
        while spoiled := [group for group in groups if not others.isdisjoint(group) and not others.issuperset(group)]:
            others.update(*spoiled)  # an operator is deferred with all its parameters or not at all
        return frozenset(one for group in groups for one in group) - others

    def division(self, outputs: Collection[Tensor], allowed: Collection[int]) -> Division | None:
        """Return the two parts of the backward of this forward; None where it stays whole.

        Not where two operators share a parameter, whose parts of the gradient could not be told apart, and not where a result has
        hooks, which each part would call.  Reentrant checkpointing allows whole backwards alone.
        """
        uses = Counter(one for call in self._noted for one in call.ids)
        chosen = [
            call
            for call in self._noted
            if all(one in allowed and uses[one] == 1 for one in call.ids) and self._hooked.isdisjoint(call.nodes)
        ]
        walk = self._walk(outputs, {node: call for call in chosen for node in call.nodes})
        if not chosen or walk.checkpoints:
            return None
        reached = [Divisible(call.edge, call.parameters) for call in chosen if not walk.seen.isdisjoint(call.nodes)]
        return Division(reached, walk.leaves)

    def _walk(self, outputs: Iterable[Tensor], around: Mapping[Any, _Noted]) -> _Walk:
        """Walk the graph around operators."""
        walk = _Walk()
        waiting = [tensor.grad_fn for tensor in outputs if tensor.requires_grad]
        while waiting:
            node = waiting.pop()
            if node is None or node in walk.seen:
                continue
            walk.visit(node)
            noted = around.get(node)
            waiting += [following for following, _ in node.next_functions] if noted is None else noted.inputs
        if walk.hides:
            walk.met |= self._elsewhere - walk.given
        return walk

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operator and note what it reads."""
        if func is torch.autograd.grad or func is Tensor.backward:
            self._nested = True
        if func is Tensor.register_hook or func is Tensor.retain_grad:
            self._hooked.add(args[0].grad_fn)
        found = deferrable(func, args, kwargs, self._by_node.__contains__)
        if found is None:
            result = func(*args, **kwargs)
            if not torch.is_grad_enabled() and _holds_tensor(result):
                self._note_hidden(args, kwargs)
            return result
        inputs = [tensor.grad_fn for tensor in found.inputs]
        result = func(*args, **kwargs)
        inner = result if result._base is None else result._base  # F.linear's matrix: who writes its view goes on from it
        noted = _Noted((result.grad_fn, inner.grad_fn), get_gradient_edge(inner), tuple(found.parameters), inputs)
        self._noted.append(noted)
        self._by_node.update(dict.fromkeys(noted.nodes, noted))
        return result

    def _note_hidden(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Read without gradients now, but perhaps computed again with them: no walk would meet these."""
        found = operands(args, kwargs)
        self._elsewhere.update(id(parameter) for parameter in (found.parameters if found is not None else ()))


class _Walk:
    """What a walk through autograd's graph has met.

    Where it ``hides`` a custom Function, the parameters that were read without gradients may be read again by its backward, as
    reentrant checkpointing does; but not those ``given`` to it.
    """

    __slots__ = ("checkpoints", "given", "hides", "leaves", "met", "seen")

    def __init__(self) -> None:
        self.seen: set[Any] = set()
        self.leaves: list[Tensor] = []
        self.met: set[int] = set()  # ids of leaves
        self.given: set[int] = set()
        self.hides = self.checkpoints = False

    def visit(self, node: Any) -> None:
        """Take one node in."""
        self.seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            self.leaves.append(leaf)
            self.met.add(id(leaf))
        elif isinstance(node, BackwardCFunction) and not isinstance(getattr(node, "entry", None), Entry):
            self.hides = True
            self.checkpoints |= type(node).__name__ == "CheckpointFunctionBackward"
            self.given.update(id(getattr(following, "variable", None)) for following, _ in node.next_functions)


def _holds_tensor(result: object) -> bool:
    return isinstance(result, Tensor) or (isinstance(result, (tuple, list)) and any(isinstance(one, Tensor) for one in result))
