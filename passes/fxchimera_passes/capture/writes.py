"""In-place writes: after a write, readers of the written tensor read the node ``after(tensor, write)``.

An alias made before the write and read after it is only right when everything between runs in one stage, so that range is
pinned (in ``GraphWriter.node_of``).  Everything that touches a buffer which an opened frame writes is pinned as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from fxchimera_passes._torch import storage_key, version
from fxchimera_passes.capture.targets import after
from fxchimera_passes.capture.watch import Seen
from fxchimera_passes.capture.writer import GraphWriter
from fxchimera_passes.structure import flatten

__all__ = ["Versions", "order_reads", "versions", "written_since"]

Versions = Sequence[tuple[Tensor, int]]


def versions(*arguments: Any) -> Versions:
    """Return the tensors inside ``arguments`` with their write counts."""
    return [(tensor, version(tensor)) for tensor in flatten(arguments)[0]]


def written_since(before: Versions, seen: Seen) -> list[Tensor]:
    """Return the tensors of ``before`` that were written since, each once."""
    changed = (tensor for tensor, count in before if version(tensor) != count or storage_key(tensor) in seen.written)
    return list({id(tensor): tensor for tensor in changed}.values())


def order_reads(writer: GraphWriter, node: fx.Node, changed: Sequence[Tensor], result: Any) -> None:
    """Let later readers of the tensors ``changed``, which ``node`` wrote, read what it left there."""
    for tensor in changed:
        old = writer.known(tensor)
        writer.writes_to.setdefault(storage_key(tensor), []).append(node)
        writer.keep_alive.add(node)
        if old is None or tensor is result:  # a result that is the argument itself is bound to the writing node
            continue
        new = writer.graph.call_function(after, (old, node))
        writer.add(new, value=tensor, depends=writer.depends(old, node))
        writer.bind(tensor, new)
        writer.pin(node, new)
