"""Runs a captured graph node by node, each in the surroundings it was recorded in: grad mode, autocast, named randomness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from fxchimera_passes.captured import Captured
from fxchimera_passes.scope import scope_of
from fxchimera_passes.whole import module_at

__all__ = ["GraphInterpreter", "interpret"]


class GraphInterpreter(fx.Interpreter):
    """An ``fx.Interpreter`` that finds constants beside the model and keeps every node's surroundings.

    ``ambient_grad`` is the grad mode that the forward was recorded in; a node of the same mode runs in the caller's.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph, constants: Mapping[str, Any], *, ambient_grad: bool = True) -> None:
        super().__init__(model, graph=graph)  # type: ignore[no-untyped-call,unused-ignore]
        self.constants, self.ambient_grad = constants, ambient_grad

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return a constant of the recording, else the model's own attribute."""
        return self.constants[target] if target in self.constants else super().get_attr(target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a submodule, or the model itself where it is recorded as one call."""
        return module_at(self.module, target)(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node in its own surroundings."""
        found = n.meta.get("info")
        scope = None if found is None else scope_of(found, self.ambient_grad)
        if scope is None:
            return super().run_node(n)
        with scope.entered():
            return super().run_node(n)


def interpret(captured: Captured, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run the whole captured graph on ``inputs`` (placeholder order) and return the output's tensors."""
    interpreter = GraphInterpreter(captured.model, captured.graph, captured.constants, ambient_grad=captured.grad_enabled)
    return list(interpreter.run(*inputs))
