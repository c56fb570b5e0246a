"""A buffer that the forward writes, as a value: what reads it after the last write reads a copy made there.

    step --- step += 1 --- copy --- layer 0 --- ... --- layer 9        the copy crosses cuts like any other value; only what is
     |______ one stage ______|                                         left of it has to stay in one stage

The buffer itself could not cross: the next micro-batch writes it while this one's copy is still to be read, or to be used in a
backward.  ``self.mean = new`` is written back as soon as the new value is known, and everything else reads a copy made before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from fxchimera_passes.capture.targets import after, rebind
from fxchimera_passes.capture.writer import GraphWriter
from fxchimera_passes.captured import NodeInfo, TensorMeta, info

__all__ = ["snapshot_buffers", "unlike"]


def snapshot_buffers(writer: GraphWriter, *, grad_enabled: bool) -> set[int | None]:
    """Let late readers of written buffers read copies; return the storages of the buffers so treated.

    A buffer that holds autograd history, or in whose place a call has put another tensor, is pinned from its first to its last use.
    """
    done: set[int | None] = set()
    names = sorted({name for node in writer.graph.nodes for name in info(node).writes})
    for node in list(writer.graph.nodes):
        if node.target is rebind:
            _copy_value(writer, node, grad_enabled)
    for name in names:
        buffer = _Buffer(writer, name)
        if not buffer.reads or buffer.storage is None:
            continue
        if len(buffer.reads) > 1 or len(buffer.rebinds) > 1 or any(_differentiable(alias) for alias in buffer.aliases):
            buffer.pin()
        else:
            buffer.treat(grad_enabled)
            done.add(buffer.storage)
    return done


def unlike(old: Tensor, new: Tensor) -> str:
    """Say what keeps ``new`` from being written into the buffer ``old``, "" when nothing does."""
    if new.shape != old.shape:
        return f"a tensor of shape {tuple(new.shape)} instead of {tuple(old.shape)}"
    return f"a tensor of {new.dtype} instead of {old.dtype}" if new.dtype != old.dtype else ""


def _copy_value(writer: GraphWriter, back: fx.Node, grad_enabled: bool) -> None:
    """Let ``back`` write a copy of what another buffer holds, which may itself be written before."""
    value = back.args[1]
    assert isinstance(value, fx.Node)
    name = writer.names.buffer_storages.get(writer.storage.get(value))
    if name is None:
        return
    source = _Buffer(writer, name)
    known = source.settled([value, *source.touching])
    with writer.graph.inserting_after(known):
        copy = _copy_of(writer, value, grad_enabled=grad_enabled)
    writer.order[copy] = writer.order[known]
    back.args = (back.args[0], copy)


def _copy_of(writer: GraphWriter, source: fx.Node, *, grad_enabled: bool) -> fx.Node:
    """Add a node, at the graph's present place of insertion, that copies ``source``."""
    value = info(source).value
    assert value is not None
    like = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta").clone()
    node: fx.Node = writer.graph.call_method("clone", (source,))
    node.meta["info"] = NodeInfo(
        value=TensorMeta(value.shape, tuple(like.stride()), value.dtype, value.requires_grad),
        depends=info(source).depends,
        module=info(source).module,
        grad_enabled=grad_enabled,
        moved_bytes=2.0 * value.bytes,
    )
    return node


class _Buffer:
    """One buffer: ``reads`` are the nodes that give it, ``aliases`` all nodes whose value lies in its memory.

    ``rebinds`` put a new value in its place, ``touching`` are other nodes that write it, and modules that have it inside.
    """

    def __init__(self, writer: GraphWriter, name: str) -> None:
        self.writer = writer
        self.nodes: list[fx.Node] = list(writer.graph.nodes)
        self.place = {node: index for index, node in enumerate(self.nodes)}
        self.reads = [node for node in self.nodes if node.op == "get_attr" and name in info(node).buffers]
        self.storage = writer.storage.get(self.reads[0]) if self.reads else None
        self.aliases = [node for node in self.nodes if writer.storage.get(node) == self.storage]
        writes = [node for node in self.nodes if name in info(node).writes]
        self.rebinds = [node for node in writes if node.target is rebind]
        inside = [node for node in self.nodes if node.op == "call_module" and name in info(node).buffers]
        self.touching = [node for node in (*writes, *inside) if node.target is not rebind]

    def pin(self) -> None:
        """Keep all uses in one stage."""
        used = [node for alias in self.aliases for node in (alias, *alias.users) if node.op != "output"]
        self.writer.pin(self.reads[0], max((*used, *self.touching), key=self.writer.order.__getitem__))

    def treat(self, grad_enabled: bool) -> None:
        """Insert the copies, and move the write-back forward."""
        if not self.rebinds:
            settled = self.settled(self.touching)
            self._insert(settled, settled, grad_enabled)
            return
        back = self.rebinds[0]
        value = back.args[1]
        assert isinstance(value, fx.Node)
        known = self.settled([value, *self.writer.writes_to.get(self.writer.storage.get(value), []), *self.touching])
        if self.place[known] < self.place[self.reads[0]]:
            known.prepend(self.reads[0])
        known.append(back)
        self.writer.order[back] = self.writer.order[known]
        if self.touching:
            self._insert(known, known, grad_enabled, but=back)
        else:  # a reader's backward may need the old value, so nobody reads the buffer itself
            self._insert(self.reads[0], None, grad_enabled, but=back)

    def settled(self, writes: Sequence[fx.Node]) -> fx.Node:
        """Return the last of ``writes``, or of the nodes that stand for what it wrote."""
        named = set(writes)
        places = [place for node, place in self.place.items() if node in named or (node.target is after and node.args[1] in named)]
        return self.nodes[max(places)]

    def _insert(self, where: fx.Node, since: fx.Node | None, grad_enabled: bool, but: fx.Node | None = None) -> None:
        """After ``where``, copy every alias that is there and has readers after ``since`` (any readers, if None)."""
        limit = -1 if since is None else self.place[since]
        for alias in [self.reads[0]] if since is None else self.aliases:
            late = [user for user in alias.users if self.place[user] > limit and user is not but]
            if not late or (self.place[alias] > limit >= 0 and alias is not self.reads[0]):
                continue
            if self.place[alias] > self.place[where]:
                where.prepend(alias)
            with self.writer.graph.inserting_after(where):
                copy = _copy_of(self.writer, alias, grad_enabled=grad_enabled)
            self.writer.order[copy] = self.writer.order[where]
            for user in late:
                user.replace_input_with(alias, copy)


def _differentiable(node: fx.Node) -> bool:
    value = info(node).value
    return value is not None and value.requires_grad
