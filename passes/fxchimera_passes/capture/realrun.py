"""Runs one closed module on fake tensors, or on real ones where fakes do not do.

Some operators have no fake kernel, and a closed module may read values (a loop over experts).  Such a module alone runs for real,
on random values of the right shapes; its results become fake again.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxchimera_passes._torch import FakeTensor, call_uncompiled, override_tables, real_values, storage_key, tensor_tables, version
from fxchimera_passes.capture.fakes import fake_of
from fxchimera_passes.capture.lines import first_line
from fxchimera_passes.structure import flatten

if TYPE_CHECKING:
    from fxchimera_passes.capture.recorder import Recorder

__all__ = ["run_closed"]

_HOOKS_REFUSED = "support saved tensor hooks"  # what transforms of torch.func say (torch 2.13)


def run_closed(recorder: Recorder, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``module`` on fake tensors; if that fails, on real ones.

    Raises:
        Exception: what the module raises on real tensors too.
    """
    watch, frames = recorder.watch.mark(), recorder.frames.mark()
    try:
        return _run(recorder, module, args, kwargs)
    except RuntimeError as error:
        if _HOOKS_REFUSED not in str(error):
            raise
        recorder.watch.rewind(watch)
        recorder.frames.rewind(frames)
        recorder.watch.seen.hookable = False
        with recorder.watch.saved.unhooked():
            return _run(recorder, module, args, kwargs)


def _run(recorder: Recorder, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, structure = flatten((args, kwargs), fresh=True)
    watch, frames = recorder.watch.mark(), recorder.frames.mark()
    try:
        return call_uncompiled(module, args, kwargs)
    except Exception as error:
        if _HOOKS_REFUSED in str(error):
            raise
        cause = f"{type(error).__name__}: {first_line(error)}"
        recorder.notes.append(f"{type(module).__name__} was run on real tensors ({cause})")
        recorder.watch.rewind(watch)
        recorder.frames.rewind(frames)
        recorder.watch.seen.blind = True  # real tensors may be read without an operator: tolist(), numpy()
        with real_values():
            return _RealRun(recorder, module).call(structure, tensors)


class _RealRun:
    """One real call of one module; every tensor it writes is a copy."""

    def __init__(self, recorder: Recorder, module: nn.Module) -> None:
        self.recorder, self.module = recorder, module
        own = list(itertools.chain(module.parameters(), module.buffers()))
        real = [recorder.real.get(id(tensor), tensor) for tensor in own]
        self.device = next((t.device for t in real if t.device.type != "meta"), torch.device("cpu"))
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}

    def call(self, structure: Any, tensors: list[Tensor]) -> Any:
        """Run on random values shaped like ``tensors`` and return the result with fake tensors in it."""
        recorder = self.recorder
        given = [self.copy(tensor) for tensor in tensors]
        counts = {}
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            if self.device.type != "cpu":
                stack.enter_context(torch.random.fork_rng(devices=[self.device], device_type=self.device.type))
            for inner in self.module.modules():
                stack.enter_context(override_tables(inner, self.copy))
            counts = {key: version(copy) for key, (_, copy) in self.copies.items()}
            held = {storage_key(copy): fake for fake, copy in self.copies.values()}
            stack.enter_context(recorder.watch.saved.real_run(held))
            stack.enter_context(recorder.watch)
            args, kwargs = structure.rebuild(given)
            result = call_uncompiled(self.module, args, kwargs)
            rebound = [t for inner in self.module.modules() for t in tensor_tables(inner)[1].values() if t is not None]
        self._note_writes(counts, {id(tensor) for tensor in rebound})
        returned, out = flatten(result)
        back = {id(copy): fake for fake, copy in self.copies.values()}
        recorder.watch.check(t for t in returned if id(t) not in back)
        return out.rebuild([back[id(t)] if id(t) in back else self._fake(t) for t in returned])

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a real tensor to use in the place of ``tensor``, the same one every time."""
        if id(tensor) not in self.copies:
            self.copies[id(tensor)] = (tensor, self._real(tensor))
        return self.copies[id(tensor)][1]

    def _real(self, tensor: Tensor) -> Tensor:
        value = self.recorder.reads.known_value(tensor)
        if value is not None:  # lengths, indices: the module may need them as they are
            return value.detach().clone().to(self.device)
        source = self.recorder.real.get(id(tensor), tensor)
        if not isinstance(source, FakeTensor) and not source.is_meta:
            copy = source.detach().clone()
        elif source.is_floating_point() or source.is_complex():
            copy = torch.randn(source.shape, dtype=source.dtype, device=self.device)
        else:
            copy = torch.zeros(source.shape, dtype=source.dtype, device=self.device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copy, requires_grad=tensor.requires_grad)
        # not a leaf, as in the forward: the module may write into it
        return copy.requires_grad_().view_as(copy) if tensor.requires_grad else copy

    def _fake(self, tensor: Tensor) -> Tensor:
        fake = fake_of(tensor.detach(), self.recorder.mode, self.recorder.device)
        if self.recorder.watch.seen.known is not None:
            self.recorder.watch.seen.known.add(storage_key(fake))
        self.recorder.watch.give(fake)
        with self.recorder.mode, torch.enable_grad():
            return fake.requires_grad_().view_as(fake) if tensor.requires_grad else fake

    def _note_writes(self, counts: dict[int, int], held: set[int]) -> None:
        """Tell the recording about writes to the copies as if they were writes to the fakes."""
        seen, names = self.recorder.watch.seen, self.recorder.writer.names
        for key, (fake, copy) in self.copies.items():
            gone = id(fake) in names.buffers and id(copy) not in held
            if gone or version(copy) != counts.get(key, version(copy)) or storage_key(copy) in seen.written:
                seen.written.add(storage_key(fake))
