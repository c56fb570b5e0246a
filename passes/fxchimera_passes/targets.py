"""How many targets count in a loss that the model computes itself.

A recorded ``cross_entropy`` takes the mean over the targets that are not ``ignore_index``, each counting by its class's weight if
there are class weights, so micro-batches must be weighted by that sum.  It is computed from the inputs and buffers alone, by the
slice of the graph that makes the targets (a shift, a padding, a view) and the class weights.
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
from fxchimera_passes.whole import module_at

__all__ = ["CountedTargets", "counted_targets"]

_FUNCTIONS = (F.cross_entropy, F.nll_loss)
_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)


@dataclass(frozen=True, slots=True)
class CountedTargets:
    """The targets of the model's own loss: how to compute them and the class weights, and which value does not count."""

    ignore_index: int
    graph: fx.Graph
    model: nn.Module
    constants: Mapping[str, Any]

    def count(self, inputs: tuple[torch.Tensor, ...]) -> float:
        """Return what torch's mean divides by, given all input tensors of a micro-batch."""
        with torch.no_grad():
            targets, classes = GraphInterpreter(self.model, self.graph, self.constants).run(*inputs)
        counted = targets[targets != self.ignore_index]
        return float(counted.numel()) if classes is None else float(classes.double()[counted].sum())


def counted_targets(captured: Captured) -> CountedTargets | None:
    """Find the one mean cross-entropy over class indices that the recording shows; None when there is none, or several."""
    found = [call for node in captured.graph.nodes if (call := _call(captured, node)) is not None]
    if len(found) != 1:
        return None
    target, classes, ignore_index = found[0]
    meta = info(target).value
    if meta is None or meta.dtype.is_floating_point or info(target).depends - {"input"}:
        return None
    if isinstance(classes, fx.Node) and info(classes).depends - {"input", "buffer"}:
        return None
    return CountedTargets(ignore_index, _slice(captured.graph, target, classes), captured.model, captured.constants)


def _call(captured: Captured, node: fx.Node) -> tuple[fx.Node, fx.Node | str | None, int] | None:
    """The target's node, the class weights (a node, or a module's buffer by name) and the ignore_index of a loss that is a mean."""
    classes: fx.Node | str | None
    if node.op == "call_function" and node.target in _FUNCTIONS:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        target, classes, ignore, reduction = (bound.arguments[name] for name in ("target", "weight", "ignore_index", "reduction"))
    elif node.op == "call_module" and isinstance(module := module_at(captured.model, str(node.target)), _MODULES):
        target = node.args[1] if len(node.args) > 1 else node.kwargs["target"]
        classes = f"{node.target}.weight" if module.weight is not None else None
        ignore, reduction = module.ignore_index, module.reduction
    else:
        return None
    return (target, classes, int(ignore)) if reduction == "mean" and isinstance(target, fx.Node) else None


def _slice(graph: fx.Graph, target: fx.Node, classes: fx.Node | str | None) -> fx.Graph:
    """Copy what the targets and class weights are computed from; every placeholder stays, so that the inputs keep their places."""
    needed, todo = set(), [node for node in (target, classes) if isinstance(node, fx.Node)]
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
    weights = part.get_attr(classes) if isinstance(classes, str) else env[classes] if isinstance(classes, fx.Node) else None
    part.output((env[target], weights))
    return part
