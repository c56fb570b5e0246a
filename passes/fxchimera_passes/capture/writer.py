"""Writes the graph: nodes with their info, and which node made which tensor.

Provenance is by tensor identity.  A tensor that nobody recorded is never turned into a constant in silence: it is a parameter or
buffer, a real tensor the model holds outside its state, or the reason for a signal to the capture loop.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from fxchimera_passes._torch import FakeTensor, storage_key
from fxchimera_passes.capture.drawn import Drawn
from fxchimera_passes.capture.frames import Frames
from fxchimera_passes.capture.lines import user_line
from fxchimera_passes.capture.names import Names
from fxchimera_passes.capture.signals import NeedClose, NeedOpen
from fxchimera_passes.capture.targets import rebuild
from fxchimera_passes.capture.watch import Seen, Watch
from fxchimera_passes.captured import NodeInfo, TensorMeta
from fxchimera_passes.structure import Structure, flatten

__all__ = ["GraphWriter"]

_INLINE = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis))

_ALL_ALIKE: Mapping[int, frozenset[str]] = MappingProxyType({})


class GraphWriter:
    """One graph under construction.

    ``order`` is a node's position; ``pins`` are ranges of positions that one stage must run, ``stale`` those from an alias to a
    position at which it is read after its memory was written.  ``makers`` tells which closed module made a tensor inside its call.
    ``writes_to`` lists the nodes that wrote each storage, ``storage`` what storage a node's value lies in.
    """

    def __init__(self, names: Names, frames: Frames, watch: Watch, device: torch.device) -> None:
        self.names, self.frames, self.makers, self.saved, self.device = names, frames, watch.makers, watch.saved, device
        self.graph = fx.Graph()
        self.order: dict[fx.Node, int] = {}
        self.pins: list[tuple[int, int]] = []
        self.stale: list[tuple[fx.Node, int]] = []
        self.constants: dict[str, Any] = {}
        self.writes_to: dict[int | None, list[fx.Node]] = {}
        self.storage: dict[fx.Node, int | None] = {}
        self.keep_alive: set[fx.Node] = set()
        self._ambient = self._autocast()
        self._node_of: dict[int, fx.Node] = {}
        self._attribute_nodes: dict[str, fx.Node] = {}
        self._constant_nodes: dict[int, fx.Node] = {}
        self._empty: dict[str, tuple[Any, Structure]] = {}
        self._kept: list[Any] = []

    # ---- nodes

    def add(
        self,
        node: fx.Node,
        *,
        value: Any = None,
        depends: Iterable[str] = (),
        seen: Seen | None = None,
        parameters: tuple[str, ...] = (),
        buffers: tuple[str, ...] = (),
        writes: tuple[str, ...] = (),
        changed: Sequence[Tensor] = (),
    ) -> fx.Node:
        """Number ``node`` and attach its :class:`NodeInfo`.

        ``value`` is what it returned while recording, ``changed`` are the tensors among its arguments that it wrote.
        """
        seen = seen or Seen()
        self.order[node] = len(self.order)
        if isinstance(value, Tensor):
            self.storage[node] = storage_key(value)
        node.meta["info"] = NodeInfo(
            value=TensorMeta.of(value) if isinstance(value, Tensor) else None,
            depends=frozenset(depends) | (frozenset(["random"]) if seen.random else frozenset()),
            module=self.frames.opened.name,
            grad_enabled=torch.is_grad_enabled(),
            autocast=self._region(),
            random=tuple(seen.random),
            parameters=parameters,
            buffers=buffers,
            writes=writes,
            mutates=self._holders(node, changed) if changed else (),
            forward_flops=seen.flops,
            moved_bytes=seen.moved,
            saved=tuple(sorted(seen.saved.items())),
            memory=self.saved.number(value) if isinstance(value, Tensor) else -1,
            dear=tuple(sorted(seen.dear.items())),
            dear_flops=seen.dear_flops,
            dear_bytes=seen.dear_moved,
            hookable=seen.hookable,
            line=user_line(),
        )
        if seen.random or writes:
            self.keep_alive.add(node)
        return node

    def _holders(self, node: fx.Node, tensors: Sequence[Tensor]) -> tuple[str, ...]:
        """Name the arguments of ``node`` that are ``tensors``, or are objects made around one of them."""
        held = {self.known(tensor) for tensor in tensors}
        arguments = node.all_input_nodes
        return tuple(a.name for a in arguments if a in held or (a.target is rebuild and not held.isdisjoint(a.all_input_nodes)))

    def _autocast(self) -> tuple[str, torch.dtype, bool]:
        kind = self.device.type
        return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    def _region(self) -> tuple[str, torch.dtype, bool] | None:
        now = self._autocast()
        return None if now == self._ambient else now

    def depends(self, *arguments: Any) -> frozenset[str]:
        """Return what the nodes inside ``arguments`` were computed from."""
        found: set[str] = set()
        fx.map_arg(arguments, lambda node: found.update(node.meta["info"].depends))
        return frozenset(found)

    def placeholder(self, index: int, tensor: Tensor) -> None:
        """Add the input ``tensor``."""
        node = self.add(self.graph.placeholder(f"input_{index}"), value=tensor, depends=["input"])
        self.bind(tensor, node)

    def pin(self, first: fx.Node, last: fx.Node) -> None:
        """Keep everything from ``first`` to ``last`` in one stage."""
        if self.order[last] > self.order[first]:
            self.pins.append((self.order[first], self.order[last]))

    # ---- provenance

    def bind(self, tensor: Tensor, node: fx.Node) -> None:
        """From now on ``tensor`` is the value of ``node``."""
        self._node_of[id(tensor)] = node
        self._kept.append(tensor)

    def known(self, tensor: Tensor) -> fx.Node | None:
        """Return the node that holds ``tensor`` now, if one does."""
        name = self.names.tensor(tensor)
        return self._node_of.get(id(tensor)) or (self._attribute_nodes.get(name) if name else None)

    def node_of(self, tensor: Tensor) -> fx.Node:
        """Return the node for ``tensor``; a reader of an alias older than a write is pinned to that alias's maker."""
        node = self.known(tensor)
        if node is None:
            name = self.names.tensor(tensor)
            return self.attribute(name, tensor) if name else self._unrecorded(tensor)
        writes = self.writes_to.get(storage_key(tensor)) if self.writes_to else None
        if writes and self.order[writes[-1]] > self.order[node]:
            self.stale.append((node, len(self.order)))
        return node

    def attribute(self, name: str, tensor: Tensor) -> fx.Node:
        """Return the node that reads the parameter or buffer ``name``."""
        if name not in self._attribute_nodes:
            is_parameter = id(tensor) in self.names.parameters
            self._attribute_nodes[name] = self.add(
                self.graph.get_attr(name),
                value=tensor,
                depends=["parameter" if is_parameter else "buffer"],
                parameters=(name,) if is_parameter else (),
                buffers=() if is_parameter else (name,),
            )
        return self._attribute_nodes[name]

    def forget_attribute(self, name: str) -> None:
        """Read the buffer ``name`` anew from now on: another tensor sits there."""
        self._attribute_nodes.pop(name, None)

    def _unrecorded(self, tensor: Tensor) -> fx.Node:
        inside = self.frames.opened.module
        what = f"a tensor of shape {tuple(tensor.shape)}"
        if isinstance(tensor, FakeTensor):
            maker = self.makers.get(id(tensor))
            if maker is not None:
                reason = f"{what} made inside {type(maker).__name__} was read, but is not part of its result"
                raise NeedOpen(maker, inside, reason, user_line())
            raise NeedClose(inside, f"{what} was read that no recorded call made", user_line())
        if tensor.requires_grad:
            reason = f"{what} that requires a gradient is no registered parameter (register it with nn.Parameter)"
            raise NeedClose(inside, reason, user_line(), fatal=True)
        return self.constant(tensor)

    def constant(self, value: Any) -> fx.Node:
        """Return the node for a value that the recording keeps as it is."""
        if id(value) not in self._constant_nodes:
            key = f"constant_{len(self.constants)}"
            self.constants[key] = value
            self._kept.append(value)
            self._constant_nodes[id(value)] = self.add(self.graph.get_attr(key), value=value)
        return self._constant_nodes[id(value)]

    # ---- arguments and results

    def convert(self, value: Any) -> Any:
        """Turn a Python argument into an fx argument."""
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, Drawn):
            return value.plain()
        if type(value) in _INLINE or isinstance(value, (torch.device, torch.dtype)):
            return value
        if type(value) in (tuple, list):
            return type(value)(self.convert(part) for part in value)
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return {key: self.convert(part) for key, part in value.items()}
        if type(value) is slice:
            return slice(self.convert(value.start), self.convert(value.stop), self.convert(value.step))
        tensors, structure = flatten(value)
        if tensors:
            return self.rebuilt(structure, tensors)
        node = self.constant(value)
        self._empty.setdefault(str(node.target), (value, flatten(value, fresh=True)[1]))
        return node

    def empty_again(self) -> None:
        """Put objects in the place of constants that had no tensors when they were passed and hold some by now (a new cache)."""
        for key, (value, structure) in self._empty.items():
            if flatten(value)[0]:
                self.constants[key] = structure.rebuild([])

    def rebuilt(self, structure: Structure, tensors: list[Tensor]) -> fx.Node:
        """Add a node that makes an object of ``structure`` around ``tensors``."""
        nodes = [self.node_of(tensor) for tensor in tensors]
        node = self.graph.call_function(rebuild, (self.constant(structure), *nodes))
        return self.add(node, depends=self.depends(nodes))

    def bind_result(self, node: fx.Node, result: Any, own: Mapping[int, frozenset[str]] = _ALL_ALIKE) -> None:
        """Give every tensor inside ``result`` a node that reads it out of ``node``; ``own`` tells what single items depend on.

        A tensor that the call only handed through, and that depends on the inputs alone, is read from where it was.
        """
        if isinstance(result, Tensor):
            self.bind(result, node)
            return
        tensors, structure = flatten(result)
        last, made = node, dict[tuple[Any, ...], fx.Node]()
        whole = self.depends(node)
        for tensor, path in zip(tensors, structure.paths(), strict=True):
            if self._handed_through(tensor, node, whole):
                continue
            depends = own.get(path[0][1], whole) if path[0][0] == "item" else whole
            current, value = node, result
            for depth, (kind, key) in enumerate(path, 1):
                value = value[key] if kind == "item" else getattr(value, key)
                if path[:depth] not in made:
                    target = operator.getitem if kind == "item" else getattr
                    made[path[:depth]] = self.add(self.graph.call_function(target, (current, key)), value=value, depends=depends)
                current = last = made[path[:depth]]
            self.bind(tensor, current)
        self.pin(node, last)

    def _handed_through(self, tensor: Tensor, node: fx.Node, depends: frozenset[str]) -> bool:
        known = self.known(tensor)
        if known is None or node in self.writes_to.get(storage_key(tensor), ()):
            return False
        return self.depends(known) <= {"input"} < depends
