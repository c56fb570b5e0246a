"""Sees every operator that runs, also inside closed modules: cost, randomness, writes, and who made which tensor.

A function mode sees a call as the user wrote it; this dispatch mode sees what that call does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fxchimera_passes._torch import FakeTensor, OpOverload, TorchDispatchMode, operator_name, storage_key, written
from fxchimera_passes.capture.flops import bytes_of, dear, each_tensor, flops_of, tensors_in
from fxchimera_passes.capture.lines import user_line
from fxchimera_passes.capture.saved import Saved
from fxchimera_passes.captured import RandomKey
from fxchimera_passes.keyed import is_random
from fxchimera_passes.marker import MARKERS

__all__ = ["Seen", "Watch"]


@dataclass(slots=True)
class Seen:
    """What ran inside one node.

    ``written`` holds the storages that operators wrote; ``named`` the identities of model parameters and buffers that they
    read.  ``read`` holds the storages that operators took as arguments; with ``blind`` some were perhaps not seen.  ``maker`` is
    the closed module whose call this is.  Storages in ``known`` were given to the call or made by it; a tensor of any other
    storage that an operator reads came in by a hidden way, and is kept in ``smuggled`` with the user's line.  ``saved`` are the
    bytes of the memory that autograd keeps, by its number; ``dear`` of what operators with much arithmetic made, which did
    ``dear_flops`` and moved ``dear_moved``.  Not ``hookable`` is what cannot run under saved-tensor hooks.
    """

    maker: nn.Module | None = None
    known: set[int | None] | None = None
    flops: float = 0.0
    moved: float = 0.0
    random: list[RandomKey] = field(default_factory=list)
    written: set[int | None] = field(default_factory=set)
    read: set[int | None] = field(default_factory=set)
    blind: bool = False
    named: dict[int, Tensor] = field(default_factory=dict)
    smuggled: list[tuple[Tensor, str]] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)
    dear: dict[int, int] = field(default_factory=dict)
    dear_flops: float = 0.0
    dear_moved: float = 0.0
    hookable: bool = True


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Charges every operator to the node being recorded; while ``operator`` is set, each operator is a node, and it is told.

    ``placed`` brings constants of opened modules to the device that is recorded for, if that is not the CPU.

    Args:
        draw: names the random operation that runs now.
        named: tells whether a tensor is a parameter or buffer of the model.
        mark: notes a split marker that runs now.
    """

    def __init__(self, draw: Callable[[], RandomKey], named: Callable[[Tensor], bool], mark: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draw, self.named, self.mark_cut = draw, named, mark
        self.seen = Seen()
        self.saved = Saved(lambda: self.seen)
        self.flops = 0.0
        self.moved = 0.0
        self.count = 0
        self.makers: dict[int, nn.Module] = {}
        self.operator: Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any], Any, Seen], None] | None = None
        self.placed: Callable[[Tensor], Tensor] | None = None
        self._kept: list[Tensor] = []

    @contextmanager
    def node(self, maker: nn.Module | None = None, known: set[int | None] | None = None) -> Iterator[Seen]:
        """Collect what runs inside one node, which makes its own casts of weights if it runs under autocast."""
        torch.clear_autocast_cache()
        outer, self.seen = self.seen, Seen(maker, known)
        try:
            with self.saved.hooks():  # above those of a region that is recorded call by call
                yield self.seen
        finally:
            self.seen = outer

    def mark(self) -> tuple[float, float, int]:
        """Return the totals so far: operations, bytes, and operators that ran."""
        return self.flops, self.moved, self.count

    def rewind(self, mark: tuple[float, float, int]) -> None:
        """Forget what the node being recorded has done since ``mark`` (an attempt that failed)."""
        self.flops, self.moved, self.count = mark
        self.seen.flops = self.seen.moved = 0.0
        self.seen.random.clear()
        self.seen.smuggled.clear()
        self.seen.saved.clear()
        self.seen.dear.clear()
        self.seen.dear_flops = self.seen.dear_moved = 0.0

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if operator_name(func) in MARKERS:
            return self.mark_cut()
        if self.operator is None:
            return self._run(func, args, kwargs)
        with self.node() as seen:
            result = self._run(func, args, kwargs)
        self.operator(func, args, kwargs, result, seen)
        return result

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        key = self.draw() if is_random(func, args, kwargs) else None
        if self.placed is not None and self.seen.maker is None:
            result = func(*each_tensor(self.placed, args), **{name: each_tensor(self.placed, kwargs[name]) for name in kwargs})
        else:
            result = func(*args, **kwargs)
        seen, inputs, outputs = self.seen, tensors_in([*args, *kwargs.values()]), tensors_in(result)
        if key is not None:
            seen.random.append(key)
        for tensor in written(func, args, kwargs):
            seen.written.add(storage_key(tensor))
        flops, moved = flops_of(func, args, kwargs, result), bytes_of(func, args, result)
        self.flops, self.moved, self.count = self.flops + flops, self.moved + moved, self.count + 1
        seen.flops, seen.moved = seen.flops + flops, seen.moved + moved
        if dear(func, args) and self.saved.keeps(seen, outputs):
            seen.dear_flops, seen.dear_moved = seen.dear_flops + flops, seen.dear_moved + moved
        self._follow(seen, inputs, outputs)
        self.saved.follow(seen, inputs, outputs)
        return result

    def check(self, tensors: Iterable[Tensor]) -> None:
        """Note those of ``tensors`` that belong to this forward and were neither given to the present call nor made by it.

        A real tensor is a constant of the model's, unless a closed module that ran on real tensors made it.
        """
        seen = self.seen
        for tensor in tensors if seen.known is not None else ():
            ours = isinstance(tensor, FakeTensor) or id(tensor) in self.makers
            if ours and storage_key(tensor) not in (seen.known or ()) and not self.named(tensor):
                seen.smuggled.append((tensor, user_line()))

    def give(self, tensor: Tensor) -> None:
        """Let the present call know ``tensor``."""
        if self.seen.known is not None:
            self.seen.known.add(storage_key(tensor))

    def _follow(self, seen: Seen, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        for tensor in inputs:
            key = storage_key(tensor)
            seen.read.add(key)
            if self.named(tensor):
                seen.named[id(tensor)] = tensor
            else:
                self.check([tensor])
        for tensor in outputs:
            self._kept.append(tensor)
            if seen.known is not None:
                seen.known.add(storage_key(tensor))
            if seen.maker is not None:
                self.makers[id(tensor)] = seen.maker
