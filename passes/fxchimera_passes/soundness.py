"""Checks on real runs that a module reads no tensor of another one that was not passed to it.

    class A: forward: BOX.append(h)          class B: forward: x + BOX[-1]

A recording shows each such channel that it takes.  One that it does not take (code that treats fake tensors in its own way, or does
something in its hundredth call) would read another micro-batch's tensor, or nothing where A runs on another rank.  Stages that are
bound inside :func:`checked_reads` watch every operator: what one module's call made, or a stage's own operations, another module
may read only as an argument.  Constants, parameters, buffers and a module's own state are free.  An operator then costs some ten
microseconds more, so this is for tests and for finding a mistake.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxchimera_passes._torch import MemoryRef, TorchDispatchMode, storage_key
from fxchimera_passes.capture.flops import tensors_in
from fxchimera_passes.capture.lines import user_line
from fxchimera_passes.errors import CaptureError
from fxchimera_passes.scope import call_in_scope
from fxchimera_passes.structure import flatten

__all__ = ["checked_reads", "watched"]

_CAST = torch.ops.aten._to_copy.default
_MANY = 4096  # storages remembered before the dead ones are looked for


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A closed module of a stage, or with ``module`` 0 the stage's own operations."""

    stage: int
    name: str
    module: int = 0

    def __str__(self) -> str:
        return f"{self.name} in stage {self.stage}" if self.module else f"the operations of stage {self.stage}"


@dataclass(slots=True)
class _Made:
    """Which place made the memory that is alive, over all stages and threads of the check."""

    table: dict[int, tuple[MemoryRef, _Place]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def note(self, key: int | None, tensor: Tensor, place: _Place) -> None:
        if key is not None and key not in self.table:
            with self.lock:
                self.table[key] = MemoryRef(tensor), place

    def forget_dead(self) -> None:
        if len(self.table) > _MANY:
            with self.lock:
                self.table = {key: made for key, made in self.table.items() if not made[0].gone}


_CHECK: ContextVar[_Made | None] = ContextVar("fxchimera_checked_reads", default=None)
_RUN: ContextVar[_Reads | None] = ContextVar("fxchimera_reads", default=None)


@contextmanager
def checked_reads() -> Iterator[None]:
    """Check the stages that are bound inside, whenever they run.

    They raise :class:`CaptureError` with the names of both modules and the line.
    """
    token = _CHECK.set(_Made())
    try:
        yield
    finally:
        _CHECK.reset(token)


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches one run of one stage."""

    supports_higher_order_operators = True

    def __init__(self, made: _Made, stage: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made, self.outside = made, _Place(stage, "")
        self.place = self.outside
        self.known: set[int | None] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.place.module:
            self.check(tensors_in([*args, *kwargs.values()]))
        result = function(*args, **kwargs)
        if function is _CAST and isinstance(args[0], nn.Parameter):
            return result  # autocast keeps it for whoever reads the parameter next
        for tensor in tensors_in(result):
            key = storage_key(tensor)
            if key not in self.known:
                self.known.add(key)
                self.made.note(key, tensor, self.place)
        return result

    def check(self, tensors: Iterable[Tensor]) -> None:
        """Refuse a tensor that another place made and that the present module was not given."""
        for tensor in tensors:
            key = storage_key(tensor)
            if key is None or key in self.known:
                continue
            _, maker = self.made.table.get(key, (None, self.place))
            if maker.module != self.place.module:
                raise CaptureError(
                    f"{self.place} reads a tensor of shape {tuple(tensor.shape)} at {user_line()} that {maker} made and that was "
                    "not passed to it; pass it as an argument, so that it comes along wherever the model is cut"
                )

    def call(self, place: _Place, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one closed module."""
        given = [*flatten((args, kwargs))[0], *module.parameters(), *module.buffers()]
        outer, self.place, self.known = (self.place, self.known), place, set(map(storage_key, given))
        try:
            result = module(*args, **kwargs)
            self.check(flatten(result)[0])
        finally:
            self.place, self.known = outer
        return result


def _call(place: _Place, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    run = _RUN.get()
    return module(*args, **kwargs) if run is None else run.call(place, module, args, kwargs)


def watched(stage: int, received: int, holder: nn.Module, graph: fx.Graph) -> Callable[[fx.GraphModule], fx.GraphModule]:
    """Prepare a stage's graph for the check, if one is on; the result makes the finished stage module run in it.

    Args:
        stage: The stage's number.
        received: How many of its first arguments come from the stage before.
        holder: Where the graph's attributes are; gets more.
        graph: Changed in place: calls of closed modules go through the check.
    """
    made = _CHECK.get()
    if made is None:
        return lambda module: module
    for number, node in enumerate(list(graph.nodes)):
        called = _called(node)
        if called is None:
            continue
        module = holder.get_submodule(called)
        place = f"place_{number}"
        setattr(holder, place, _Place(stage, f"{type(module).__name__} ({called})", id(module)))
        with graph.inserting_before(node):
            where = graph.create_node("get_attr", place)
            if node.op == "call_module":
                node.args = (where, graph.create_node("get_attr", called), *node.args)
                node.op, node.target = "call_function", _call
            else:
                function = f"call_{number}"
                setattr(holder, function, _call)
                node.args = (node.args[0], graph.create_node("get_attr", function), where, *node.args[1:])
    return lambda module: _in_check(module, made, stage, received)


def _called(node: fx.Node) -> str | None:
    """The closed module that a node calls."""
    if node.op == "call_module":
        return str(node.target)
    function = node.args[1] if node.target is call_in_scope else None
    if isinstance(function, fx.Node) and function.op == "get_attr" and not str(function.target).startswith("function_of_"):
        return str(function.target)
    return None


def _in_check(module: fx.GraphModule, made: _Made, stage: int, received: int) -> fx.GraphModule:
    plain = module.forward

    def forward(*args: Any) -> Any:
        made.forget_dead()
        run = _Reads(made, stage)
        for tensor in args[:received]:
            made.note(storage_key(tensor), tensor, run.outside)
        token = _RUN.set(run)
        try:
            with run:
                return plain(*args)
        finally:
            _RUN.reset(token)

    module.forward = forward
    return module
