"""Reading a tensor's value into Python: ``if mask.all():``, ``int(lengths.max())``, ``x.tolist()``.

The recording follows one answer.  A value that depends on the inputs only becomes a guard, computed again from every batch; one
that depends on nothing is always the same; one that depends on parameters, buffers or randomness cannot be recorded here, and
the module that reads it has to stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxchimera_passes._torch import real_values
from fxchimera_passes.capture.interpret import GraphInterpreter
from fxchimera_passes.capture.lines import user_line
from fxchimera_passes.capture.signals import NeedClose
from fxchimera_passes.capture.writer import GraphWriter
from fxchimera_passes.captured import Guard

__all__ = ["READS", "Reads"]

READS = frozenset(
    (
        *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "__array__"),
        *("item", "tolist", "numpy", "is_nonzero", "equal", "allclose"),
    )
)
"""Names of the torch functions that turn tensors into Python values."""


@dataclass(frozen=True, slots=True)
class _Replay:
    """Computes one read again from input tensors: ``function`` of what ``graph`` returns."""

    function: Callable[..., Any]
    graph: fx.Graph
    model: nn.Module
    constants: Mapping[str, Any]
    clone: bool

    def value(self, inputs: tuple[Tensor, ...]) -> Any:
        given = [tensor.detach().clone() for tensor in inputs] if self.clone else list(inputs)
        with torch.no_grad():
            args, kwargs = GraphInterpreter(self.model, self.graph, self.constants).run(*given)
            return self.function(*args, **kwargs)

    def __call__(self, inputs: tuple[Tensor, ...]) -> Any:
        return _comparable(self.value(inputs))


def _comparable(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


class Reads:
    """The rule for one recording; ``real_inputs`` are the caller's own tensors in placeholder order."""

    def __init__(self, writer: GraphWriter, model: nn.Module, real_inputs: Sequence[Tensor]) -> None:
        self.writer, self.model = writer, model
        self.real_inputs = tuple(real_inputs)
        self.guards: list[Guard] = []

    def read(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the real value of ``function(*args, **kwargs)`` and note what it hangs on."""
        name, line, inside = getattr(function, "__name__", "read").strip("_"), user_line(), self.writer.frames.opened
        arguments = (self.writer.convert(args), self.writer.convert(dict(kwargs)))
        depends = self.writer.depends(arguments)
        if depends - {"input"}:
            reason = f"{name}() reads a value that depends on {' and '.join(sorted(depends))}"
            raise NeedClose(inside.module, reason, line)
        if depends and any(tensor.is_meta for tensor in self.real_inputs):
            raise NeedClose(inside.module, f"{name}() reads an input's value, but the example inputs are meta tensors", line)
        replay = self._replay(function, arguments)
        with real_values():
            value = replay.value(self.real_inputs)
        if depends:
            text = f"{name}() in {type(inside.module).__name__}"
            self.guards.append(Guard(description=text, line=line, expected=_comparable(value), evaluate=replay))
        return value

    def _replay(self, function: Callable[..., Any], arguments: Any) -> _Replay:
        needed = self._needed(arguments)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.writer.graph.nodes:
            if node in needed or node.op == "placeholder":
                copy = graph.node_copy(node, copies.__getitem__)
                copy.args, copy.kwargs = self._on_host(copy.args), self._on_host(copy.kwargs)
                copies[node] = copy
        graph.output(fx.map_arg(arguments, copies.__getitem__))
        clone = any(node in self.writer.keep_alive for node in needed)
        return _Replay(function, graph, self.model, self.writer.constants, clone)

    def _needed(self, arguments: Any) -> set[fx.Node]:
        """Collect the nodes that ``arguments`` are computed from, writes to their memory included."""
        todo: list[fx.Node] = []
        fx.map_arg(arguments, todo.append)
        needed: set[fx.Node] = set()
        while todo:
            node = todo.pop()
            if node not in needed:
                needed.add(node)
                todo += node.all_input_nodes
                todo += self.writer.writes_to.get(self.writer.storage.get(node), [])
        return needed

    def _on_host(self, argument: Any) -> Any:
        """Compute where the real inputs are, not on the device recorded for."""
        host = self.real_inputs[0].device if self.real_inputs else torch.device("cpu")
        return fx.node.map_aggregate(argument, lambda a: host if isinstance(a, torch.device) else a)
