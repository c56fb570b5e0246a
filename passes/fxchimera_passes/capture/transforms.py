"""Records what ``torch.vmap`` does by the operators that it calls, which work on whole batches.

Inside the transform the user's function sees wrapped tensors without values of their own; below it every operator gets the batched
tensors that the recording knows.  Autograd remakes a view on its way up, so an unknown tensor is looked up by the memory it shows::

    vmap(f)(x)  ->  aten.mul(x, mask) -> aten.sum(..., [1]) -> aten.permute(...)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from fxchimera_passes._torch import OpOverload, storage_key
from fxchimera_passes.capture.watch import Seen
from fxchimera_passes.capture.writes import order_reads
from fxchimera_passes.captured import info
from fxchimera_passes.structure import flatten

if TYPE_CHECKING:
    from fxchimera_passes.capture.recorder import Recorder

__all__ = ["TransformRule"]

_Look = tuple[int | None, int, tuple[int, ...], tuple[int, ...], torch.dtype]


class TransformRule:
    """The rule of one recording; ``active`` while the outermost ``vmap`` runs."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.active = recorder, False
        self._nodes: dict[_Look, fx.Node] = {}

    def vmap(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run ``original(*args, **kwargs)``, the outermost vmap, with its operators recorded."""
        recorder = self.recorder
        if recorder.paused or self.active:
            return original(*args, **kwargs)
        self.active, recorder.watch.operator = True, self._operator
        try:
            result = original(*args, **kwargs)
        finally:
            self.active, recorder.watch.operator = False, None
        self._recognise(result)
        self._nodes.clear()
        return result

    def _operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, seen: Seen) -> None:
        writer = self.recorder.writer
        with self.recorder.pause():
            self._recognise((args, dict(kwargs)))
            arguments = writer.convert(args), writer.convert(dict(kwargs))
            changed = [t for t in flatten((args, dict(kwargs)))[0] if storage_key(t) in seen.written]
            writes = tuple(sorted({writer.names.buffer_storages[k] for k in seen.written if k in writer.names.buffer_storages}))
            node = writer.graph.call_function(func, *arguments)
            writer.add(node, value=result, depends=writer.depends(arguments), seen=seen, writes=writes, changed=changed)
            order_reads(writer, node, changed, result)
            writer.bind_result(node, result)
            needs = torch.is_grad_enabled() and any(_needs_gradient(source) for source in node.all_input_nodes)
            for tensor in flatten(result)[0]:
                made = writer.known(tensor)
                if made is not None:
                    self._nodes[_look(tensor)] = made
                    value = info(made).value
                    if needs and value is not None and (tensor.is_floating_point() or tensor.is_complex()):
                        made.meta["info"] = replace(info(made), value=replace(value, requires_grad=True))

    def _recognise(self, value: Any) -> None:
        """Bind the tensors inside ``value`` that nobody knows but that show the memory of a recorded one."""
        writer = self.recorder.writer
        for tensor in flatten(value)[0]:
            if writer.known(tensor) is None and (node := self._nodes.get(_look(tensor))) is not None:
                writer.bind(tensor, node)


def _needs_gradient(node: fx.Node) -> bool:
    value = info(node).value
    return value is not None and value.requires_grad


def _look(tensor: Tensor) -> _Look:
    return storage_key(tensor), int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
