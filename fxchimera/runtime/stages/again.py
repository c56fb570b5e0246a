"""Run a region of a stage's forward again when its backward first needs what the forward did not keep.

    F   region(x):  autograd saves t0, t1, ...  ->  empty slots, numbered
    B   slot t7 is asked for  ->  region(x) again, under the caller's surroundings of F: fills t0, t1, ...  and stops after the last

The graph is that of F, so gradients are added in the same order and come out bitwise the same; what is drawn at random has a name
and is drawn again.  ``torch.utils.checkpoint`` does the same once for every call into the engine: a deferred weight gradient makes
one such call for each operator (runtime.deferral), and would run the region again for each.  And its selective form refuses a kept
result that is written in place later, as by ``ReLU(inplace=True)``; here that result is not kept.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.context import CallerContext
from fxchimera_passes import _torch
from fxchimera_passes._torch import TorchDispatchMode
from fxchimera_passes.capture.flops import dear, tensors_in
from fxchimera_passes.capture.opening import only_collects
from fxchimera_passes.captured import info
from fxchimera_passes.plan import SELECTIVE

__all__ = ["Again", "again_for", "ours"]

_PLAIN = (int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, slice)


def again_for(mode: str) -> Callable[[fx.GraphModule], nn.Module]:
    """Return what makes of a region a module that runs it again in the backward."""
    return partial(Again, selective=mode == SELECTIVE)


def ours(hook: Any) -> bool:
    """Tell whether a saved-tensor hook is that of a region."""
    return isinstance(getattr(hook, "__self__", None), _Frame)


class Again(nn.Module):
    """A region of a stage.

    It runs plainly without gradients, and while a module in it has hooks of the user's: these are to be called once.
    """

    def __init__(self, body: fx.GraphModule, *, selective: bool) -> None:
        super().__init__()
        self.body = body
        self.selective = selective
        self._inner = tuple(body.modules())

    def forward(self, *args: Any) -> Any:
        """Run the region."""
        if not torch.is_grad_enabled() or not all(map(_repeatable, args)) or any(map(self._hooked, self._inner)):
            return self.body(*args)
        return _Frame(self.body, args, _Keeping() if self.selective else None).run()

    @staticmethod
    def _hooked(module: nn.Module) -> bool:
        return not all(map(only_collects, _torch.hooks_of(module)[0]))


class _Slot:
    """Stands for a tensor that autograd saved."""

    __slots__ = ("__weakref__", "frame", "tensor")

    def __init__(self, frame: _Frame, tensor: Tensor) -> None:
        self.frame = frame
        self.tensor: Tensor | None = tensor


class _Done(BaseException):
    """Ends a second run: everything that was saved is there again."""


class _Frame:
    """One micro-batch in a region; the slots that are still wanted keep it."""

    def __init__(self, body: fx.GraphModule, args: tuple[Any, ...], keeping: _Keeping | None) -> None:
        self._body, self._keeping = body, keeping
        self._args: tuple[Any, ...] | None = args
        self._versions = [_torch.version(tensor) for tensor in tensors_in(args)]
        self._caller = CallerContext()
        self._slots: list[weakref.ref[_Slot]] = []
        self._filled = 0
        self._lock = threading.Lock()

    def run(self) -> Any:
        """Run the region the first time."""
        with saved_tensors_hooks(self._save, _read):
            args = self._args or ()
            result = self._body(*args) if self._keeping is None else self._keeping.run(self._body, args, second=False)
        for reference in self._slots:  # until here the model may have differentiated by itself
            if (slot := reference()) is not None:
                slot.tensor = None
        return result

    def fill(self) -> None:
        """Run the region a second time, unless that has been done."""
        with self._lock:
            if self._args is not None:
                self._caller.run(self._second)
                self._args = self._keeping = None

    def _save(self, tensor: Tensor) -> _Slot:
        slot = _Slot(self, tensor)
        self._slots.append(weakref.ref(slot))
        return slot

    def _second(self) -> None:
        if self._versions != [_torch.version(tensor) for tensor in tensors_in(self._args)]:
            raise FxChimeraError(
                f"a value that enters a recomputed part of the model ({self._between()}) was written in place after it was read "
                'there, which the recording did not show. Use recompute="none", or write to a copy'
            )
        args = tuple(_each_tensor(_alias, value) for value in self._args or ())
        try:
            with saved_tensors_hooks(self._fill, _same):
                if self._keeping is None:
                    self._body(*args)
                else:
                    self._keeping.run(self._body, args, second=True)
        except _Done:
            return
        raise FxChimeraError(
            f"a recomputed part of the model ({self._between()}) saved {len(self._slots)} tensors for its backward the first time "
            f'and {self._filled} the second: its forward is not a function of its inputs. Use recompute="none"'
        )

    def _between(self) -> str:
        """The region's first and last module or operation, and the user's line where it begins."""
        known = [(node, info(node)) for node in self._body.graph.nodes if node.op.startswith("call_")]
        ends = known[0], known[-1]
        first, last = (str(node.target) if node.op == "call_module" else one.module or node.name for node, one in ends)
        line = next((one.line for _, one in known if one.line), "")
        return f"{first!r} to {last!r}{f', at {line}' if line else ''}"

    def _fill(self, tensor: Tensor) -> Tensor:
        slot, value = self._slots[self._filled](), tensor.detach()  # an operator's result, saved with its past, would be a cycle
        self._filled += 1
        if slot is not None:
            slot.tensor = value
        if self._filled == len(self._slots):
            raise _Done
        return value


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the results of operators with much arithmetic, and gives them back the second time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[Any] = []
        self._places: dict[int | None, list[int]] = {}
        self._next = 0
        self._second = False

    def run(self, body: fx.GraphModule, args: tuple[Any, ...], *, second: bool) -> Any:
        """Run a region in this mode."""
        self._second = second
        with self:
            return body(*args)

    def __torch_dispatch__(
        self, func: _torch.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Pass everything on but what is there already."""
        kwargs = kwargs or {}
        wanted = dear(func, args) and torch.is_grad_enabled() and ours(_torch.saved_tensor_hook())
        if self._second and wanted:
            kept, self._kept[self._next] = self._kept[self._next], None
            self._next += 1
            return func(*args, **kwargs) if kept is None else kept
        result = func(*args, **kwargs)
        if not self._second:
            self._drop(_torch.written(func, args, kwargs))
            if wanted:
                self._keep(result)
        return result

    def _keep(self, result: Any) -> None:
        for tensor in tensors_in(result):
            self._places.setdefault(_torch.storage_key(tensor), []).append(len(self._kept))
        self._kept.append(_each_tensor(Tensor.detach, result))

    def _drop(self, written: Iterable[Tensor]) -> None:
        """What is written in place afterwards is not what the operator made."""
        for tensor in written:
            for place in self._places.pop(_torch.storage_key(tensor), ()):
                self._kept[place] = None


def _read(slot: _Slot) -> Tensor:
    if slot.tensor is None:
        slot.frame.fill()
    assert slot.tensor is not None
    return slot.tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _alias(tensor: Tensor) -> Tensor:
    """The same values without a past; no leaf, as it was none."""
    return tensor.detach().requires_grad_().view_as(tensor) if tensor.requires_grad else tensor


def _repeatable(value: Any) -> bool:
    """Whether an argument is sure to be at the second run what it is at the first."""
    return all(map(_repeatable, value)) if isinstance(value, (tuple, list)) else isinstance(value, (Tensor, *_PLAIN))


def _each_tensor(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    kind = type(value)
    return kind(_each_tensor(function, one) for one in value) if kind in (tuple, list) else value
