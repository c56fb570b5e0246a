"""Randomness that has a name: the same draws whatever the cuts, the schedule, the direction and the number of stages.

Every random operation of the forward has a key (module, call of it, ordinal in the call).  Its numbers come from a hash of
(seed, step, micro-batch, key) instead of from whatever was drawn before it on this rank.

Threads of one process share torch's generator of a device, so an operation runs with the generator set to its key and put back,
under one lock (some microseconds).  The user's own random stream is never moved.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxchimera_passes._torch import TorchDispatchMode
from fxchimera_passes.captured import RandomKey
from fxchimera_passes.hostrandom import HostStates, Seeding, seed_host
from fxchimera_passes.recompute import Replacement, Replay

__all__ = [
    "HOST_ORDINAL",
    "generators_alone",
    "is_random",
    "keyed_model",
    "keyed_random",
    "many_microbatches",
    "microbatch_randomness",
    "named_microbatch",
    "seed_now",
    "seed_of",
]

# A key with this ordinal says that the module draws from Python's or numpy's global generator.
HOST_ORDINAL = -1

# One lock for the process: torch's, Python's and numpy's global generators are the process's own.
_GENERATORS = threading.RLock()
_MICROBATCH: ContextVar[tuple[int, int, int] | None] = ContextVar("fxchimera_microbatch", default=None)
_ACTIVE: ContextVar[KeyedMode | None] = ContextVar("fxchimera_keyed", default=None)
_PROBABILITIES = ("dropout_p", "dropout", "p")
_SWITCHES = ("train", "training")


class _Named:
    """See :func:`microbatch_randomness`; every action of a schedule enters one."""

    __slots__ = ("_held", "_token", "_where")

    def __init__(self, where: tuple[int, int, int], held: bool) -> None:
        self._where, self._held = where, held

    def __enter__(self) -> None:
        self._token = _MICROBATCH.set(self._where)
        if not self._held:
            _CHECKPOINTS.hold()

    def __exit__(self, *_: object) -> None:
        if not self._held:
            _CHECKPOINTS.release()
        _MICROBATCH.reset(self._token)


def microbatch_randomness(seed: int, step: int, microbatch: int, *, held: bool = False) -> AbstractContextManager[None]:
    """Name the micro-batch whose forward runs inside, in this thread; ``held`` is for use inside of :func:`many_microbatches`."""
    return _Named((seed, step, microbatch), held)


@contextmanager
def many_microbatches() -> Iterator[None]:
    """Inside, micro-batches will be named again and again: what that needs is installed once."""
    _CHECKPOINTS.hold()
    try:
        yield
    finally:
        _CHECKPOINTS.release()


def named_microbatch() -> AbstractContextManager[None]:
    """Name the micro-batch (0, 0, 0) unless one is named already, so that what is drawn in a recording has a key too."""
    return microbatch_randomness(0, 0, 0) if _MICROBATCH.get() is None else nullcontext()


def seed_now(key: RandomKey) -> int:
    """The seed of one random operation in the micro-batch named at present."""
    with named_microbatch():
        where = _MICROBATCH.get()
        assert where is not None
        return seed_of(*where, key)


def keyed_random(keys: Sequence[RandomKey]) -> AbstractContextManager[object]:
    """A context in which the i-th random aten operation draws from ``keys[i]``; does nothing outside a named micro-batch.

    Operations beyond the list continue the last key's ordinals.  A key with ``HOST_ORDINAL`` seeds Python's and numpy's global
    generators for the whole context and puts them back after it; the lock is held meanwhile, as nothing narrower is safe, so the
    recording gives such a key only to modules that it saw drawing from them.
    """
    where = _MICROBATCH.get()
    if where is None or not keys:
        return nullcontext()
    host = next((key for key in keys if key.ordinal == HOST_ORDINAL), None)
    mode = KeyedMode(where, tuple(key for key in keys if key.ordinal != HOST_ORDINAL) or (replace(keys[-1], ordinal=0),))
    return mode if host is None else _with_host(mode, seed_of(*where, host))


@contextmanager
def keyed_model(model: nn.Module, keys: Sequence[RandomKey]) -> Iterator[None]:
    """:func:`keyed_random` for one forward of the whole ``model``, of which ``keys`` are all random operations in order.

    Every module with a ``HOST_ORDINAL`` key seeds Python's and numpy's generators when its keyed call begins, as its stage would.
    """
    where = _MICROBATCH.get()
    hosts = [key for key in keys if key.ordinal == HOST_ORDINAL] if where is not None else []
    with ExitStack() as stack:
        stack.enter_context(keyed_random([key for key in keys if key.ordinal != HOST_ORDINAL]))
        if where is not None and hosts:
            stack.enter_context(_host_generators())
            for name in dict.fromkeys(key.module for key in hosts):
                seeding = Seeding({key.call: seed_of(*where, key) for key in hosts if key.module == name})
                stack.callback(seeding.around(model.get_submodule(name)))
        yield


@contextmanager
def generators_alone(key: RandomKey | None) -> Iterator[None]:
    """Have torch's default generators, host and present device, for oneself; with ``key`` they begin at its seed for now."""
    with _GENERATORS:
        generators = [] if key is None else [torch.default_generator]
        if key is not None and torch.accelerator.is_available():
            found = _generator((), {"device": torch.accelerator.current_accelerator()})
            generators += [found] if found is not None else []
        states = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                assert key is not None
                generator.manual_seed(seed_now(key))
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def seed_of(seed: int, step: int, microbatch: int, key: RandomKey) -> int:
    """The 63-bit seed of one random operation; the same in every process and Python version."""
    text = f"{seed}/{step}/{microbatch}/{key.module}/{key.call}/{key.ordinal}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def is_random(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an aten operation draws numbers in this call.

    torch tags attention and dropout as random even where their probability is zero; which attention kernel runs depends on dtype
    and device, so those calls must not count.
    """
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return False
    for place, argument in enumerate(function._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
        if argument.name in _SWITCHES and value is False:
            return False
        if argument.name in _PROBABILITIES and isinstance(value, float) and value == 0.0:
            return False
    return True


class KeyedMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each random operation on a generator seeded from its key, ``keys[done]`` next."""

    def __init__(self, where: tuple[int, int, int], keys: tuple[RandomKey, ...], done: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where, self.keys, self.done = where, keys, done

    def __enter__(self) -> KeyedMode:
        self.token = _ACTIVE.set(self)
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        _ACTIVE.reset(self.token)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass everything on, random operations under their key."""
        kwargs = kwargs or {}
        if not is_random(function, args, kwargs):
            return function(*args, **kwargs)
        seed = seed_of(*self.where, _key(self.keys, self.done))
        self.done += 1
        generator = _generator(args, kwargs)
        if generator is None:
            return function(*args, **kwargs)
        with _GENERATORS:
            state = generator.get_state()
            generator.manual_seed(seed)
            try:
                return function(*args, **kwargs)
            finally:
                generator.set_state(state)


def _replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """What torch's checkpoint is to run in place of ``function``: in the backward it draws what it draws now."""
    mode = _ACTIVE.get()
    if mode is None:
        return function
    where, keys, done = mode.where, mode.keys, mode.done
    return Replay(function, lambda: _ACTIVE.get() is not None, lambda: KeyedMode(where, keys, done))


_CHECKPOINTS = Replacement(_replayed, lambda: _MICROBATCH.get() is not None)


def _key(keys: tuple[RandomKey, ...], place: int) -> RandomKey:
    if place < len(keys):
        return keys[place]
    return replace(keys[-1], ordinal=keys[-1].ordinal + 1 + place - len(keys))


def _generator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator | None:
    """The generator that an operation draws from: the one it is given, else its device's default one; None on fake devices."""
    given = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)), None)
    if given is not None:
        return given
    device = kwargs.get("device")
    if device is None:
        device = next((value.device for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), torch.device("cpu"))
    device = torch.device(device)
    if device.type == "meta":
        return None
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    found: torch.Generator = module.default_generators[module.current_device() if device.index is None else device.index]
    return found


@contextmanager
def _with_host(mode: AbstractContextManager[object], seed: int) -> Iterator[None]:
    with _host_generators():
        seed_host(seed)
        with mode:
            yield


@contextmanager
def _host_generators() -> Iterator[None]:
    """Have Python's and numpy's global generators for oneself, and put them back."""
    with _GENERATORS:
        states = HostStates()
        try:
            yield
        finally:
            states.restore()
