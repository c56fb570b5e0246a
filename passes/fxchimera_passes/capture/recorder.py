"""One recording: the rules and what they share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxchimera_passes._torch import FakeTensor, FakeTensorMode, saved_tensor_hook, without
from fxchimera_passes.capture.attributes import AttributeRule
from fxchimera_passes.capture.fakes import fake_of
from fxchimera_passes.capture.frames import Frames
from fxchimera_passes.capture.functions import FunctionRule
from fxchimera_passes.capture.hostdraws import HostDraws
from fxchimera_passes.capture.leaning import leaning
from fxchimera_passes.capture.libraries import values_readable
from fxchimera_passes.capture.lines import user_line
from fxchimera_passes.capture.marks import Mark
from fxchimera_passes.capture.modules import ModuleRule
from fxchimera_passes.capture.names import Names
from fxchimera_passes.capture.patches import patched
from fxchimera_passes.capture.paths import UNKNOWN, Path
from fxchimera_passes.capture.profile import Profile
from fxchimera_passes.capture.reads import Reads
from fxchimera_passes.capture.realrun import run_closed
from fxchimera_passes.capture.signals import NeedClose, NeedSeed
from fxchimera_passes.capture.transforms import TransformRule
from fxchimera_passes.capture.watch import Seen, Watch
from fxchimera_passes.capture.writer import GraphWriter
from fxchimera_passes.captured import Assumption, RandomKey, info
from fxchimera_passes.hostrandom import seed_host
from fxchimera_passes.keyed import seed_now
from fxchimera_passes.structure import Structure, flatten

__all__ = ["Recorder"]


@dataclass(frozen=True, slots=True)
class _Seed:
    """Evaluates to the seed of a module call in the micro-batch named at present."""

    key: RandomKey

    def __call__(self, inputs: tuple[Tensor, ...]) -> int:
        return seed_now(self.key)


def _never(inputs: tuple[Tensor, ...]) -> object:
    """Evaluates to something else each time: what leans is for planning, no micro-batch draws it."""
    return object()


class Recorder:
    """Records one forward of ``model``, whose parameters and buffers are fake by now.

    ``opened`` are qualified names; ``real`` maps the identity of a fake parameter or
    buffer to the model's own tensor.  ``stateful`` and ``notes`` go into the report; ``effectful`` are modules whose call must not
    be left out even when nobody reads its result; ``host`` notices draws that are not torch's.  Modules in ``seeded`` draw such
    numbers from a key of their call, which goes into ``host_keys``.  ``lean`` is what even draws read into Python give; ``path``
    and ``may_assume`` are for :class:`Reads`, ``parked`` for :class:`AttributeRule`.
    """

    def __init__(
        self,
        model: nn.Module,
        opened: Collection[str],
        mode: FakeTensorMode,
        device: torch.device,
        real: Mapping[int, Tensor],
        *,
        seeded: Collection[str] = (),
        lean: float | None = None,
        path: Path = UNKNOWN,
        may_assume: Callable[[str], bool] = bool,
        parked: Mapping[str, Iterable[str]] = MappingProxyType({}),
    ) -> None:
        self.model, self.opened, self.mode, self.device = model, frozenset(opened), mode, device
        self.real, self.seeded, self.lean = real, frozenset(seeded), lean
        self.host_keys: list[RandomKey] = []
        self.paused = 0
        self.grad_enabled = torch.is_grad_enabled()
        self.profile = Profile()
        self.entered: set[str] = set()
        self.frames = Frames(model)
        names = Names(model)
        self.original_buffers: dict[str, Tensor] = names.slots(model.modules())
        self.marks: list[Mark] = []
        self.watch = Watch(self.frames.draw, lambda tensor: names.tensor(tensor) is not None, self._mark_cut)
        self.watch.saved.leave_out([*model.parameters(), *model.buffers()])
        self._constants: dict[int, tuple[Tensor, Tensor]] = {}
        self.watch.placed = self._placed if device.type != "cpu" else None
        self.writer = GraphWriter(names, self.frames, self.watch, device)
        self.functions = FunctionRule(self)
        self.modules = ModuleRule(self)
        self.transforms = TransformRule(self)
        self.attributes = AttributeRule(self, parked)
        self.reads = Reads(self.writer, model, (), lean, path=path, may_assume=may_assume)
        self.stateful: dict[str, tuple[str, ...]] = {}
        self.notes: list[str] = []
        self.effectful: set[nn.Module] = set()
        self.host = HostDraws()
        self._hooks = [saved_tensor_hook()]

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let torch calls through without recording them."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def check_frame(self) -> None:
        """Notice what the opened module that runs now has done unseen since the last check.

        Raises:
            NeedSeed: it draws from Python's or numpy's generator.
        """
        frame, drawn = self.frames.opened, " and ".join(self.host.moved())
        if drawn and frame.name not in self.seeded:
            raise NeedSeed(frame.module, f"its forward draws from {drawn}", user_line())

    @contextmanager
    def seeded_frame(self, name: str) -> Iterator[None]:
        """Let the opened module ``name``, whose call runs inside, draw from the key of this call, and guard that it is the same."""
        if name not in self.seeded:
            yield
            return
        with self.host.aside() as moved:
            key = self.frames.host_key()
            seed_host(seed_now(key))
            moved()
            self.host_keys.append(key)
            self.reads.drew = True
            holds = _Seed(key) if self.lean is None else _never
            self.reads.guard(f"draws of {name or 'the model'} from Python's or numpy's generator", holds)
            yield

    def check_hooks(self) -> None:
        """Note that autograd would save tensors through a hook here (checkpointing, offloading), which a stage does not do."""
        hook = saved_tensor_hook()
        if hook is None or hook in self._hooks:
            return
        self._hooks.append(hook)
        if hook.__module__ == checkpoint.__module__:
            self.note_unsaved("activation checkpointing", user_line(beyond=checkpoint.__code__.co_filename))
        else:
            self.note_unsaved("a saved-tensor hook", user_line())

    def note_unsaved(self, what: str, line: str) -> None:
        """Note that what the user does at ``line`` to save memory has no effect."""
        owner = type(self.frames.opened.module).__name__
        self.notes.append(
            f"{what} at {line} saves no memory, as the calls of {owner} are recorded one by one: move that region into a submodule"
        )

    def _mark_cut(self) -> None:
        closed = tuple(call.name for call in self.frames.stack if not call.opened)
        self.marks.append(Mark(len(self.writer.order), user_line(), closed))

    def refuse_smuggled(self, reader: str, seen: Seen) -> None:
        """Notice that a call read a tensor without having been given it.

        Raises:
            NeedClose: it did: where the recording is cut, it would read another micro-batch's, or none.
        """
        if seen.smuggled:
            (tensor, line), names = seen.smuggled[0], self.writer.names
            maker = self.watch.makers.get(id(tensor))
            made = f", made inside {type(maker).__name__} ({names.modules.get(id(maker), '')})" if maker is not None else ""
            shape = tuple(tensor.shape)
            reason = f"{reader} reads a tensor of shape {shape}{made}, that was not passed to it; pass it as an argument"
            raise NeedClose(self.frames.opened.module, reason, line, fatal=True)

    def _placed(self, tensor: Tensor) -> Tensor:
        """A constant of the model's, which its stages will have on their devices, as a tensor of the device recorded for."""
        if isinstance(tensor, FakeTensor) or tensor.device.type != "cpu" or not tensor.dim():
            return tensor
        if id(tensor) not in self._constants:
            self._constants[id(tensor)] = tensor, fake_of(tensor, self.mode, self.device)
        return self._constants[id(tensor)][1]

    @property
    def assumed(self) -> list[Assumption]:
        """The answers taken so far for values that depend on parameters."""
        return self.reads.guesses.taken

    @property
    def parameters_read(self) -> list[str]:
        """The parameters that the nodes so far read, in their order."""
        return [name for node in self.writer.graph.nodes for name in info(node).parameters]

    def unobserved(self) -> AbstractContextManager[Any]:
        """Take the function mode away, so that torch takes the paths it takes in a plain run."""
        return without(self.functions)

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one closed module as a plain forward would."""
        with self.unobserved():
            return run_closed(self, module, args, kwargs)

    def record(self, inputs: Sequence[Tensor], structure: Structure) -> Structure:
        """Record one forward on the real ``inputs``, arranged by ``structure``; return the output's structure."""
        self.reads.real_inputs = tuple(inputs)
        fakes = [fake_of(tensor, self.mode, self.device) for tensor in inputs]
        self.watch.saved.leave_out(fakes)
        for index, fake in enumerate(fakes):
            self.writer.placeholder(index, fake)
        args, kwargs = structure.rebuild(fakes)
        readable = values_readable(self.reads.readable)
        patches = patched(self.modules, self.functions.apply, self.transforms.vmap)
        even = leaning(self.lean if self.seeded else None)
        noticing = self.host.noticing()
        with self.mode, patches, self.attributes.installed(), readable, even, noticing, self.watch, self.functions:
            output = self.model(*args, **kwargs)
        self.attributes.settle()
        tensors, out = flatten(output)
        self.writer.graph.output(tuple(self.writer.node_of(tensor) for tensor in tensors))
        return out
