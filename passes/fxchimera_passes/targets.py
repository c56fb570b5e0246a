"""How many targets count in a loss that the model computes itself.

A recorded ``cross_entropy`` takes the mean over the targets that are not ``ignore_index``, so micro-batches must be weighted by
that count.  It is computed from the inputs alone, by the slice of the graph that makes the targets (a shift, a padding, a view).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from fxchimera_passes.capture.interpret import GraphInterpreter
from fxchimera_passes.captured import Captured, info

__all__ = ["CountedTargets", "counted_targets"]

_FUNCTIONS = (F.cross_entropy, F.nll_loss)
_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)


@dataclass(frozen=True, slots=True)
class CountedTargets:
    """The targets of the model's own loss: how to compute them from its inputs, and which value does not count."""

    ignore_index: int
    graph: fx.Graph
    model: nn.Module
    constants: Mapping[str, Any]

    def count(self, inputs: tuple[torch.Tensor, ...]) -> int:
        """Return the number of targets that count, given all input tensors of a micro-batch."""
        with torch.no_grad():
            targets: torch.Tensor = GraphInterpreter(self.model, self.graph, self.constants).run(*inputs)
        return int((targets != self.ignore_index).sum())


def counted_targets(captured: Captured) -> CountedTargets | None:
    """Find the one mean cross-entropy over class indices that the recording shows; None when there is none, or several."""
    found = [call for node in captured.graph.nodes if (call := _call(captured, node)) is not None]
    if len(found) != 1:
        return None
    target, ignore_index = found[0]
    meta = info(target).value
    if meta is None or meta.dtype.is_floating_point or info(target).depends - {"input"}:
        return None
    return CountedTargets(ignore_index, _slice(captured.graph, target), captured.model, captured.constants)


def _call(captured: Captured, node: fx.Node) -> tuple[fx.Node, int] | None:
    """The target's node and the ignore_index of a loss call, if ``node`` is one that takes the mean."""
    if node.op == "call_function" and node.target in _FUNCTIONS:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        target, ignore, reduction = (bound.arguments[name] for name in ("target", "ignore_index", "reduction"))
    elif node.op == "call_module" and isinstance(module := captured.model.get_submodule(str(node.target)), _MODULES):
        target = node.args[1] if len(node.args) > 1 else node.kwargs["target"]
        ignore, reduction = module.ignore_index, module.reduction
    else:
        return None
    return (target, int(ignore)) if reduction == "mean" and isinstance(target, fx.Node) else None


def _slice(graph: fx.Graph, wanted: fx.Node) -> fx.Graph:
    """Copy ``wanted`` and what it is computed from; every placeholder stays, so that the inputs keep their places."""
    needed, todo = set(), [wanted]
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    part = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in needed or node.op == "placeholder":
            env[node] = part.node_copy(node, env.__getitem__)
    part.output(env[wanted])
    return part
