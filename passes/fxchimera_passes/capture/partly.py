"""Operations of which one result depends on the inputs alone, though another depends on parameters.

    data, batch_sizes = pack(embedded, lengths)          batch_sizes counts the lengths, whatever the embedding is

So it can be known while recording, and guarded; whatever else goes into the operation is filled with zeros for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from fxchimera_passes.capture.writer import GraphWriter
from fxchimera_passes.captured import info

__all__ = ["PARTLY", "own_dependencies", "stand_ins"]

# Name of the function -> index of a result -> indices of all positional arguments whose values it depends on.
_RESULTS: Mapping[str, Mapping[int, tuple[int, ...]]] = {
    # (input, lengths, batch_first): the second result is how many sequences are longer than each step
    "_pack_padded_sequence": {1: (1,)},
    # (data, batch_sizes, batch_first, padding_value, total_length): the second result is the lengths
    "_pad_packed_sequence": {1: (1,)},
}

PARTLY = frozenset(_RESULTS)
"""Names of these operations.  Their kernels read values, so on tensors without values they fail with any error."""


def own_dependencies(writer: GraphWriter, func: Callable[..., Any], args: Sequence[Any]) -> dict[int, frozenset[str]]:
    """Map the index of a result to what it depends on, for the results of ``func`` that do not depend on all ``args`` (nodes)."""
    table = _RESULTS.get(getattr(func, "__name__", ""), {})
    return {index: writer.depends([args[k] for k in used]) for index, used in table.items() if max(used) < len(args)}


def stand_ins(arguments: Any) -> dict[fx.Node, int]:
    """Return nodes to be filled with a number so that ``arguments``, which depend on inputs alone, can be computed from inputs."""
    todo: list[fx.Node] = []
    fx.map_arg(arguments, todo.append)
    filled: dict[fx.Node, int] = {}
    seen: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            partly = [source for source in node.all_input_nodes if _hidden(source) and not _hidden(node)]
            filled |= {hidden: 0 for source in partly for hidden in source.all_input_nodes if _hidden(hidden)}
            todo += [further for source in partly for further in source.all_input_nodes if not _hidden(further)]
            todo += [source for source in node.all_input_nodes if source not in partly]
    return filled


def _hidden(node: fx.Node) -> bool:
    return bool(info(node).depends & {"parameter", "buffer"})
