"""The model's own initialisation, for some of its tensors only, with the same values whatever else is on this rank.

Models say how they begin in several ways: ``reset_parameters()`` of a module (torch's convention), ``_init_weights(module)``
of a model (transformers, timm, nanoGPT), ``init_weights()`` of a whole model (torchtitan).  All of them run here on the user's own
modules, in which everything but the wanted tensors is on the meta device, where writing does nothing.  Random numbers are keyed by
module and by their place in the call, so they do not depend on which tensors are wanted.  What is written is watched: a tensor that
nobody fills would train from whatever was in the memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.slots import Slot, like, put, slots_of
from fxchimera_passes._torch import TorchDispatchMode, written
from fxchimera_passes.captured import RandomKey
from fxchimera_passes.keyed import HOST_ORDINAL, keyed_random, microbatch_randomness

__all__ = ["DeviceOf", "ParamInit", "initialise"]

DeviceOf: TypeAlias = Callable[[str], torch.device]
ParamInit: TypeAlias = Callable[[nn.Module], Any]
_Calls: TypeAlias = Iterator[tuple[str, str, Callable[[], Any]]]  # module, word for errors and keys, what to call

_GIVEN, _RESET, _PER_MODULE, _WHOLE = "param_init_fn", "reset_parameters", "_init_weights", "init_weights"
_KINDS = (_GIVEN, _RESET, _PER_MODULE, _WHOLE)


def initialise(
    model: nn.Module, wanted: Sequence[Slot], device_of: DeviceOf, seed: int, param_init_fn: ParamInit | None
) -> dict[str, torch.Tensor]:
    """Compute what the model's own initialisation puts into ``wanted``; the model is as before afterwards.

    A tied parameter is initialised where it has its first name.  First every module's constructor is repeated
    (``reset_parameters``, inner modules first), then what models do after that (``_init_weights``, ``init_weights``).

    Args:
        model: the user's model.
        wanted: slots to compute.
        device_of: where they shall be, by name.
        seed: of the random numbers.
        param_init_fn: fills the parameters and buffers of one module, as in FSDP; modules that it leaves alone begin as above.

    Returns:
        The new tensors by name; those that nothing has written are not among them.

    Raises:
        FxChimeraError: The user's code raises.
    """
    left = {slot.name: slot for slot in wanted}
    done: dict[str, torch.Tensor] = {}
    with _on_meta(model):
        if param_init_fn is not None:
            done |= _run(model, left, device_of, seed, lambda: _given(model, left, param_init_fn))
            touched = {name.rpartition(".")[0] for name in done}
            left = {name: slot for name, slot in left.items() if name.rpartition(".")[0] not in touched}
        if left:
            done |= _run(model, left, device_of, seed, lambda: _own(model, left))
    return done


@contextmanager
def _on_meta(model: nn.Module) -> Iterator[None]:
    """Inside, no tensor of the model has values."""
    real = [slot for slot in slots_of(model) if not slot.tensor.is_meta]
    for slot in real:
        stand_in = like(slot.tensor, "meta")
        for name in slot.names:
            put(model, name, stand_in)
    try:
        yield
    finally:
        for slot in real:
            for name in slot.names:
                put(model, name, slot.tensor)


def _run(
    model: nn.Module, wanted: Mapping[str, Slot], device_of: DeviceOf, seed: int, calls: Callable[[], _Calls]
) -> dict[str, torch.Tensor]:
    """Put empty tensors in the places of ``wanted``, make the calls, and take out what was written."""
    empty = {name: like(slot.tensor, device_of(name)) for name, slot in wanted.items()}
    addresses = {name: _address(tensor) for name, tensor in empty.items()}
    before = {name: put(model, name, tensor) for name, tensor in empty.items()}
    watch = _Watch()
    try:
        with torch.no_grad():
            for module, word, call in calls():
                with watch, _keyed(seed, module, word):
                    _call(model, module, word, call)
    finally:
        after = {name: put(model, name, tensor) for name, tensor in before.items()}
    found = {}
    for name, tensor in after.items():
        kept = tensor is empty[name] and _address(tensor) == addresses[name]
        if not tensor.is_meta and (not kept or not tensor.numel() or addresses[name] in watch.addresses):
            found[name] = _as_wanted(wanted[name], tensor, empty[name])
    return found


def _as_wanted(slot: Slot, tensor: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
    """What the user's code has left in a slot's place, in the form that the slot has."""
    if tensor.shape != slot.tensor.shape:
        raise FxChimeraError(
            f"{slot} was initialised with the shape {tuple(tensor.shape)}, but the model was recorded with "
            f"{tuple(slot.tensor.shape)}; fill it in place (torch.nn.init, copy_)"
        )
    if tensor is not empty:
        with torch.no_grad():
            empty.copy_(tensor)
    return empty


def _keyed(seed: int, module: str, word: str) -> Any:
    """Name the randomness of one call; no forward has a call of a negative number."""
    call = -1 - _KINDS.index(word)
    keys = [RandomKey(module, call, HOST_ORDINAL), RandomKey(module, call, 0)]

    @contextmanager
    def named() -> Iterator[None]:
        with microbatch_randomness(seed, 0, 0), keyed_random(keys):
            yield

    return named()


def _call(model: nn.Module, module: str, word: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except Exception as error:
        where = f"module {module!r} ({type(model.get_submodule(module)).__name__})" if module else f"the {type(model).__name__}"
        raise FxChimeraError(
            f"{word} failed for {where}: {type(error).__name__}: {error}. It runs while what other ranks own, and what has "
            "values already, is on the meta device; give the weights with checkpoint=, or fill them with param_init_fn="
        ) from error


def _given(model: nn.Module, wanted: Mapping[str, Slot], function: ParamInit) -> _Calls:
    for name, module in _bottom_up(model):
        if _own_names(name, module) & wanted.keys():
            yield name, _GIVEN, lambda module=module: function(module)  # type: ignore[misc]


def _own(model: nn.Module, wanted: Mapping[str, Slot]) -> _Calls:
    """The model's own functions, in the order in which they run when a model with weights is made."""
    holders = {name.rpartition(".")[0] for name in wanted}
    modules = [(name, module) for name, module in _bottom_up(model) if _holds(name, holders)]
    for name, module in modules:
        reset = getattr(module, _RESET, None) or getattr(module, f"_{_RESET}", None)
        if reset is not None and _takes(reset, 0):
            yield name, _RESET, reset
    for name, module in modules:
        function = next((f for f in _above(model, name, _PER_MODULE) if _takes(f, 1)), None)
        if function is not None:
            yield name, _PER_MODULE, lambda function=function, module=module: function(module)  # type: ignore[misc]
    for name, module in modules:
        whole = getattr(module, _WHOLE, None)
        higher = [f for f in _above(model, name, _WHOLE)[1:] if _takes(f, 0)]
        if whole is not None and _takes(whole, 0) and not higher and not _above(model, name, _PER_MODULE):
            yield name, _WHOLE, whole


def _bottom_up(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules under their first names, inner ones first, in the order of ``nn.Module.apply``."""
    seen: set[int] = set()

    def walk(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for key, child in module.named_children():
            yield from walk(f"{path}.{key}" if path else key, child)
        yield path, module

    yield from walk("", model)


def _own_names(path: str, module: nn.Module) -> set[str]:
    return {f"{path}.{key}" if path else key for key in (*module._parameters, *module._buffers)}


def _holds(path: str, holders: set[str]) -> bool:
    return not path or any(holder == path or holder.startswith(f"{path}.") for holder in holders)


def _above(model: nn.Module, path: str, attribute: str) -> list[Callable[..., Any]]:
    """The methods of this name of a module and those that contain it, the innermost first."""
    parts = path.split(".") if path else []
    modules = [model.get_submodule(".".join(parts[:length])) for length in range(len(parts), -1, -1)]
    return [found for module in modules if callable(found := getattr(module, attribute, None))]


def _takes(function: Any, count: int) -> bool:
    """Whether ``function`` can be called with ``count`` positional arguments and needs them all."""
    if not callable(function):
        return False
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in named if p.default is p.empty]
    return len(needed) == count and all(p.default is not p.empty for p in parameters if p.kind is p.KEYWORD_ONLY)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the memory that operators write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.addresses: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.addresses.update(_address(tensor) for tensor in written(function, args, kwargs or {}) if not tensor.is_meta)
        return result
