"""Arguments that a call fills: key-value caches, lists of hidden states, conv states.

The call gets a fresh copy of the container for each micro-batch, and what it put there is read back out of that copy.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from fxchimera_passes.capture.targets import reached
from fxchimera_passes.capture.writer import GraphWriter
from fxchimera_passes.structure import Path, Structure, flatten

__all__ = ["Filled", "note_filled"]


class Filled:
    """Remembers the arguments of one call, to find what the call put into them."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.slots: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        self.before: dict[Any, tuple[list[Tensor], Structure]] = {
            key: flatten(value, fresh=True) for key, value in self.slots.items() if not isinstance(value, Tensor)
        }
        self.found: dict[Any, list[tuple[Tensor, Path]]] = {}

    def collect(self) -> bool:
        """Find what the call put into its arguments, ``found``: by argument, the new tensors with their paths."""
        known = {id(tensor) for tensors, _ in self.before.values() for tensor in tensors}
        for key in self.before:
            tensors, structure = flatten(self.slots[key])
            for tensor, path in zip(tensors, structure.paths(), strict=True):
                if id(tensor) not in known:
                    self.found.setdefault(key, []).append((tensor, path))
        return bool(self.found)

    def rebuild(self, writer: GraphWriter, arguments: tuple[list[Any], dict[str, Any]]) -> dict[Any, fx.Node]:
        """Give the call fresh copies of the arguments that it fills; return the nodes that make them."""
        made: dict[Any, fx.Node] = {}
        for key in self.found:
            tensors, structure = self.before[key]
            made[key] = writer.rebuilt(structure, tensors)
            if isinstance(key, int):
                arguments[0][key] = made[key]
            else:
                arguments[1][key] = made[key]
        return made


def note_filled(writer: GraphWriter, node: fx.Node, filled: Filled, made: dict[Any, fx.Node]) -> None:
    """Add the nodes that read back what ``node`` put into its arguments."""
    for key, found in filled.found.items():
        for tensor, path in found:
            read = writer.graph.call_function(reached, (made[key], writer.constant(path), node))
            writer.add(read, value=tensor, depends=writer.depends(node))
            writer.bind(tensor, read)
            writer.pin(made[key], read)
            writer.keep_alive.add(node)
