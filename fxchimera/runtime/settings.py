"""What the user can set without our knowledge, as a value that can be compared: arguments, and the attributes of modules.

A recording bakes Python values in: a scale in an attribute, a dropout rate, an option object among the arguments.  A value that
differs from the recorded one must lead to another recording, so it is made comparable here: numbers and texts by value, containers
and plain objects by what they hold, functions, tensors and modules by identity.
"""

from __future__ import annotations

import dataclasses
import hashlib
import types
from collections.abc import Collection, Hashable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["HOOK_TABLES", "Same", "attributes", "frozen", "hooks", "settings"]

HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_TORCHS_OWN = frozenset(vars(nn.Module()))
_LOOKED_AT = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)
_OPTIONS = ("Config", "Configuration", "Options", "Args", "Namespace")
_FOREIGN = ("torch", "logging", "threading", "_thread", "re", "weakref", "io", "_io", "queue", "functools", "types")
_DEPTH = 24
_LARGE_BYTES = 1 << 24


class Same:
    """An object that equals itself only; its text is the same in every process."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        named = self.value if hasattr(self.value, "__qualname__") else type(self.value)
        return f"<{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}>"


def frozen(value: Any, seen: dict[int, Hashable] | None = None, depth: int = _DEPTH, *, objects: bool = True) -> Hashable:
    """Return a hashable picture of ``value``; pictures are equal iff a recording may take one value for the other.

    ``seen`` keeps the pictures of objects that are met again and again, such as a configuration that all modules share.  Without
    ``objects`` a plain object is looked into only if it holds options (by its class's name); others, say a trainer, are the same
    as long as they are the same object.
    """
    if value is None or isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, float):
        return float, repr(value)  # a nan, too, is like itself; zeros of two signs differ
    if depth == 0:
        return Same(value)
    seen = {} if seen is None else seen
    if id(value) not in seen:
        seen[id(value)] = Same(value)  # what leads back to itself
        seen[id(value)] = _picture(value, seen, depth - 1, objects)
    return seen[id(value)]


def _picture(value: Any, seen: dict[int, Hashable], depth: int, objects: bool) -> Hashable:
    kind = type(value)

    def inner(item: Any) -> Hashable:
        return frozen(item, seen, depth, objects=objects)

    if isinstance(value, (tuple, list)):
        return kind, tuple(inner(item) for item in value)
    if isinstance(value, Mapping):
        return kind, tuple((inner(key), inner(item)) for key, item in value.items())
    if isinstance(value, (set, frozenset)):
        return kind, tuple(sorted((inner(item) for item in value), key=repr))
    if isinstance(value, (np.ndarray, np.generic)) and value.nbytes <= _LARGE_BYTES and not value.dtype.hasobject:
        return kind, value.shape, value.dtype.str, hashlib.blake2b(value.tobytes()).hexdigest()
    if _by_identity(value):
        return Same(value)
    if dataclasses.is_dataclass(value):
        return kind, tuple(inner(getattr(value, field.name, None)) for field in dataclasses.fields(value))
    if hasattr(value, "__dict__") and (objects or kind.__name__.endswith(_OPTIONS)):
        return kind, tuple((name, inner(item)) for name, item in vars(value).items())
    return Same(value)


def _by_identity(value: Any) -> bool:
    no_value = (torch.Tensor, nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
    return isinstance(value, no_value) or type(value).__module__.partition(".")[0] in _FOREIGN


def attributes(module: nn.Module, ignored: Collection[str] = ()) -> dict[str, Any]:
    """Return what the user's code has hung on a module: its attributes but for torch's own bookkeeping."""
    return {name: value for name, value in vars(module).items() if name not in _TORCHS_OWN and name not in ignored}


def hooks(module: nn.Module) -> tuple[Same, ...]:
    """Return the hooks that run with a module's forward and backward."""
    tables = [vars(module).get(table) for table in _LOOKED_AT]
    return tuple(Same(hook) for table in tables if table for hook in table.values())


def settings(model: nn.Module, stateful: Mapping[str, Collection[str]], names: Mapping[int, str]) -> tuple[Hashable, ...]:
    """Return all that a recording of ``model`` depends on besides the batch: one entry a module, then the rest.

    ``stateful`` are the attributes that a forward writes itself, by the module's name; ``names`` the modules' names by ``id``.
    """
    seen: dict[int, Hashable] = {}
    entries: list[Hashable] = []
    for module in model.modules():
        own = attributes(module, stateful.get(names.get(id(module), ""), ()))
        pictures = tuple((name, frozen(value, seen, objects=False)) for name, value in own.items())
        entries.append((type(module), module.training, pictures, hooks(module)))
    kind = next((parameter.device.type for parameter in model.parameters() if not parameter.is_meta), "cpu")
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    frozen_ones = tuple(parameter.requires_grad for parameter in model.parameters())
    return (*entries, (frozen_ones, torch.is_grad_enabled(), autocast, torch.get_default_dtype()))
