"""Runs a captured graph node by node, each under the grad mode and autocast state it was recorded in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxchimera_passes.captured import Captured, NodeInfo

__all__ = ["GraphInterpreter", "interpret", "node_context"]


@contextmanager
def node_context(node: NodeInfo) -> Iterator[None]:
    """Enter the no_grad and autocast region that ``node`` was recorded in; outside any, keep the caller's state."""
    with ExitStack() as stack:
        if not node.grad_enabled:
            stack.enter_context(torch.no_grad())
        if node.autocast is not None:
            device, dtype, enabled = node.autocast
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        yield


class GraphInterpreter(fx.Interpreter):
    """An ``fx.Interpreter`` that finds constants beside the model and keeps every node's context."""

    def __init__(self, model: nn.Module, graph: fx.Graph, constants: Mapping[str, Any]) -> None:
        super().__init__(model, graph=graph)  # type: ignore[no-untyped-call,unused-ignore]
        self.constants = constants

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return a constant of the recording, else the model's own attribute."""
        return self.constants[target] if target in self.constants else super().get_attr(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node in its own context."""
        found = n.meta.get("info")
        if found is None or (found.grad_enabled and found.autocast is None):
            return super().run_node(n)
        with node_context(found):
            return super().run_node(n)


def interpret(captured: Captured, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run the whole captured graph on ``inputs`` (placeholder order) and return the output's tensors."""
    result = GraphInterpreter(captured.model, captured.graph, captured.constants).run(*inputs)
    return list(result)
