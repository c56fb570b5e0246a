"""Records the torch functions that an opened module calls, as the user wrote them.

A ``TorchFunctionMode`` sees a call before torch takes it apart: ``F.multi_head_attention_forward`` is one node.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from fxchimera_passes._torch import VALUE_NEEDED, CheckpointFunction, in_transform, storage_key
from fxchimera_passes.capture.lines import user_line
from fxchimera_passes.capture.partly import PARTLY, own_dependencies
from fxchimera_passes.capture.reads import READS
from fxchimera_passes.capture.signals import NeedClose
from fxchimera_passes.capture.sizes import sized_by_inputs
from fxchimera_passes.capture.targets import FunctionApply
from fxchimera_passes.capture.watch import Seen
from fxchimera_passes.capture.writes import Versions, order_reads, versions, written_since
from fxchimera_passes.structure import flatten

if TYPE_CHECKING:
    from fxchimera_passes.capture.recorder import Recorder

__all__ = ["FunctionRule"]

# Set attributes of their first argument; no operator shows that.
_SETTERS = frozenset(["__set__", "requires_grad_"])
# Matter although nobody reads their result.
_EFFECTS = _SETTERS | frozenset(
    ["__setitem__", "__delitem__", "register_hook", "retain_grad", "register_post_accumulate_grad_hook"]
)
_FAILURES: tuple[type[Exception], ...] = (*VALUE_NEEDED, RuntimeError)
_QUERIES = frozenset(
    ["size", "dim", "stride", "__len__", "numel", "is_contiguous", "is_floating_point", "is_complex", "ndimension"]
)
_OPERATORS: Mapping[str, Callable[..., Any]] = {"__getitem__": operator.getitem, "__setitem__": operator.setitem}
# Some methods are Python functions of another name: ``x ** 2`` calls one that is named "pow" and no function of any module.
_METHOD_NAMES: Mapping[Any, str] = {value: name for name, value in vars(Tensor).items() if isinstance(value, types.FunctionType)}
_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType)


class FunctionRule(TorchFunctionMode):
    """The function mode of one recording."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if self.recorder.paused or self.recorder.transforms.active or name in _QUERIES:
            return func(*args, **kwargs)
        with self.recorder.pause():
            inside = self.recorder.frames.opened.module
            if in_transform():
                raise NeedClose(inside, "a torch.func transform (vmap, grad, ...) runs here", user_line())
            if name in READS:
                return self.recorder.reads.read(func, args, kwargs)
            if name == "backward":
                raise NeedClose(inside, "backward() is called inside the forward", user_line(), fatal=True)
            if name in ("__iter__", "__reversed__") and args and isinstance(args[0], Tensor):
                rows = self._record(torch.unbind, "unbind", (args[0], 0), {})
                return iter(rows if name == "__iter__" else rows[::-1])
            return self._record(func, name, args, kwargs)

    def _record(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.recorder.check_hooks()
        before = versions(args, kwargs)
        with self.recorder.watch.node() as seen:
            try:
                result = func(*args, **kwargs)
            except _FAILURES as error:
                if not isinstance(error, VALUE_NEEDED) and name not in PARTLY:
                    raise
                result = sized_by_inputs(self.recorder, func, args, kwargs)
                if result is not None:
                    return self._note(func, name, args, kwargs, result, seen, before)
                reason = f"{name}() needs values to know its result ({type(error).__name__})"
                raise NeedClose(self.recorder.frames.opened.module, reason, user_line()) from error
        return self._note(func, name, args, kwargs, result, seen, before)

    def _note(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        seen: Seen,
        before: Versions,
    ) -> Any:
        """Add the node of a call that gave ``result``."""
        writer = self.recorder.writer
        if not seen.written and name not in _EFFECTS and not flatten(result)[0]:
            return result
        arguments = writer.convert(args), writer.convert(dict(kwargs))
        node = self._call_node(func, name, *arguments)
        writes = tuple(sorted({writer.names.buffer_storages[k] for k in seen.written if k in writer.names.buffer_storages}))
        changed = written_since(before, seen)
        touched = [args[0]] if name in _SETTERS else changed
        writer.add(node, value=result, depends=writer.depends(arguments), seen=seen, writes=writes, changed=touched)
        if name in _EFFECTS:
            writer.keep_alive.add(node)
        order_reads(writer, node, changed, result)
        writer.bind_result(node, result, own_dependencies(writer, func, arguments[0]))
        if func is torch.autograd.grad:  # differentiates through everything that its inputs were used for
            writer.pin(min(node.all_input_nodes, key=writer.order.__getitem__), node)
        return result

    def _call_node(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> fx.Node:
        graph = self.recorder.writer.graph
        owner: Any = getattr(func, "__self__", None)
        if name == "__get__":
            return graph.call_function(getattr, (args[0], owner.__name__))
        if name == "__set__":
            return graph.call_function(setattr, (args[0], owner.__name__, args[1]))
        if name in _OPERATORS and isinstance(func, _METHODS):
            return graph.call_function(_OPERATORS[name], args, kwargs)
        function: Any = func
        if function in _METHOD_NAMES:
            return graph.call_method(_METHOD_NAMES[function], args, kwargs)
        if isinstance(function, _METHODS) or getattr(Tensor, name, None) is function:
            return graph.call_method(name, args, kwargs)
        return graph.call_function(function, args, kwargs)

    def apply(self, original: Callable[..., Any], cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one ``autograd.Function``: a node that keeps its own backward."""
        recorder, writer = self.recorder, self.recorder.writer
        if recorder.paused:
            return original(*args, **kwargs)
        if recorder.transforms.active:
            raise NeedClose(recorder.frames.opened.module, f"{cls.__name__}.apply() is called inside vmap", user_line())
        if cls is CheckpointFunction:
            recorder.note_unsaved("activation checkpointing", user_line())
            return args[0](*args[2:])
        with recorder.pause():
            recorder.check_hooks()
            before = versions(args, kwargs)
            given = {storage_key(tensor) for tensor in flatten((args, kwargs))[0]}
            with recorder.watch.node(known=given) as seen, recorder.unobserved():
                result = original(*args, **kwargs)
                recorder.watch.check(flatten(result)[0])
            recorder.refuse_smuggled(f"{cls.__name__}.apply", seen)
            arguments = writer.convert(args), writer.convert(kwargs)
            node = writer.graph.call_function(FunctionApply(cls), *arguments)
            changed = written_since(before, seen)
            writer.add(node, value=result, depends=writer.depends(arguments), seen=seen, changed=changed)
            order_reads(writer, node, changed, result)
            writer.bind_result(node, result)
        return result
