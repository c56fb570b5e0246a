"""Counts what autograd keeps of a forward until the backward: the activations that every micro-batch in flight holds.

A saved-tensor hook sees each tensor as an operator saves it.  Memory is counted once however many operators save it or views of it,
and not at all where it is there anyway: parameters, buffers, inputs and constants.  Inside a checkpointed region nothing is saved
but what the region was given; that is what its operators read and did not make.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fxchimera_passes._torch import FakeTensor, saved_tensor_hook, storage_key

if TYPE_CHECKING:
    from fxchimera_passes.capture.watch import Seen

__all__ = ["Saved"]


class Saved:
    """Numbers the memory of one recording and notes in the record of the present node (``seen``) what is kept for the backward."""

    def __init__(self, seen: Callable[[], Seen]) -> None:
        self._seen = seen
        self._copies: Mapping[int | None, Tensor] | None = None
        self._runs = 0
        self._there: set[int | None] = {None}
        self._numbers: dict[tuple[int | None, int], int] = {}
        self._region: tuple[object, set[int | None]] = (None, set())
        self._kept: list[Tensor] = []
        self._active: list[saved_tensors_hooks] = []
        self._hook = _Hook(self)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the memory of ``tensors``: it is there without the forward."""
        for tensor in tensors:
            self._kept.append(tensor)
            self._there.add(storage_key(tensor))

    def number(self, tensor: Tensor) -> int:
        """Return the number of the memory that ``tensor`` lies in, -1 for memory that is not counted."""
        key = storage_key(tensor)
        if not isinstance(tensor, FakeTensor):
            if self._copies is None:
                return -1
            if key not in self._copies:  # this memory is given back, and perhaps given out again, when the run is over
                return self._number(key, self._runs)
            key = storage_key(self._copies[key])
        return -1 if key in self._there else self._number(key, 0)

    @contextmanager
    def real_run(self, copies: Mapping[int | None, Tensor]) -> Iterator[None]:
        """Take real tensors for what they stand for while a module runs on them: ``copies`` maps memory to the fake it is of."""
        self._copies, self._runs = copies, self._runs + 1
        try:
            yield
        finally:
            self._copies = None

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Let autograd tell what it saves."""
        hooks = saved_tensors_hooks(self._hook, _unchanged)
        with hooks:
            self._active.append(hooks)
            try:
                yield
            finally:
                self._active.pop()

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """Count nothing for a while: ``torch.func`` transforms refuse to run while a hook is there."""
        active = list(self._active)
        for hooks in reversed(active):
            hooks.__exit__()
        try:
            yield
        finally:
            for hooks in active:
                hooks.__enter__()

    def follow(self, seen: Seen, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        """Note what an operator takes from outside of the checkpointed region that it runs in, if it runs in one."""
        hook = saved_tensor_hook()
        if hook is None or hook is self._hook:
            return
        if self._region[0] is not hook:
            self._region = (hook, set())
        made = self._region[1]
        for tensor in inputs:
            if storage_key(tensor) not in made:
                self._note(seen.saved, tensor)
        made.update(storage_key(tensor) for tensor in outputs)

    def keeps(self, seen: Seen, outputs: Iterable[Tensor]) -> bool:
        """Note what an operator with much arithmetic made, unless the model itself computes it again in the backward."""
        hook = saved_tensor_hook()
        if not torch.is_grad_enabled() or not (hook is None or hook is self._hook):
            return False
        for tensor in outputs:
            self._note(seen.dear, tensor)
        return True

    def save(self, tensor: Tensor) -> None:
        """Note a tensor that autograd saves."""
        self._note(self._seen().saved, tensor)

    def _note(self, record: dict[int, int], tensor: Tensor) -> None:
        number = self.number(tensor)
        if number >= 0:
            if isinstance(tensor, FakeTensor):
                self._kept.append(tensor)
            record[number] = tensor.untyped_storage().nbytes()

    def _number(self, key: int | None, run: int) -> int:
        return self._numbers.setdefault((key, run), len(self._numbers))


class _Hook:
    """Tells a :class:`Saved` of what autograd saves.

    Autograd's graph keeps the hook, and a recording's tensors keep the graph, which Python's garbage collector cannot look into.
    So the hook must not keep the recording, which would stay for ever, and the model with it.
    """

    def __init__(self, saved: Saved) -> None:
        self._saved = weakref.ref(saved)

    def __call__(self, tensor: Tensor) -> Tensor:
        if (saved := self._saved()) is not None:
            saved.save(tensor)
        # an operator's own output, if it is fake, comes with the operator, which would then keep itself
        return tensor.detach() if tensor.grad_fn is not None else tensor


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
