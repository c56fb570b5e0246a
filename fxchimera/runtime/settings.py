"""What the user can set without our knowledge, as a value that can be compared: arguments, and the attributes of modules.

A recording bakes Python values in: a scale in an attribute, a dropout rate, an option object among the arguments.  A value that
differs from the recorded one must lead to another recording, so it is made comparable here: numbers and texts by value, containers
and plain objects by what they hold, functions, tensors and modules by identity.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import operator
import types
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

__all__ = ["HOOK_TABLES", "Same", "Settings", "Snapshot", "attributes", "frozen", "hooks"]

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
_TORCHS_OWN = frozenset((*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"))  # the latter: an RNN's own parameters again
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
    kind: Any = type(value)

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
        return kind, tuple(inner(getattr(value, name, None)) for name in _fields_of(kind))
    if hasattr(value, "__dict__") and (objects or kind.__name__.endswith(_OPTIONS)):
        return kind, tuple((name, inner(item)) for name, item in vars(value).items())
    return Same(value)


@functools.lru_cache(maxsize=256)
def _fields_of(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


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


class Snapshot:
    """All that a recording depends on besides the batch, at one moment: one entry a module, then the rest."""

    __slots__ = ("_hash", "entries")

    def __init__(self, entries: tuple[Hashable, ...]) -> None:
        self.entries = entries
        self._hash = hash(entries)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Snapshot) and self._hash == other._hash and self.entries == other.entries)

    def __hash__(self) -> int:
        return self._hash


class _Seen(NamedTuple):
    """A module when it was last looked at; ``settled`` means that its picture changes only when one of ``values`` does."""

    values: tuple[Any, ...]
    picture: Hashable
    settled: bool


class Settings:
    """Watches a model whose modules stay the same objects; looking again costs about a microsecond a module."""

    def __init__(self, model: nn.Module, stateful: Mapping[str, Iterable[str]]) -> None:
        self._modules = list(model.named_modules())
        self._slots = [(module._parameters, key) for _, module in self._modules for key in module._parameters]
        self._stateful = {name: set(own) for name, own in stateful.items()}
        self._seen: dict[int, _Seen] = {}
        self._latest = Snapshot(())

    def ignore(self, stateful: Mapping[str, Iterable[str]]) -> None:
        """From now on do not look at these attributes, by module name, which a forward writes itself."""
        for name, own in stateful.items():
            self._stateful.setdefault(name, set()).update(own)
        self._seen.clear()

    def look(self) -> Snapshot:
        """Return the present settings: the same object as long as nothing has changed."""
        pictures: dict[int, Hashable] = {}
        entries = [self._picture(name, module, pictures) for name, module in self._modules]
        parameters = [table[key] for table, key in self._slots]
        kind = next((p.device.type for p in parameters if p is not None and not p.is_meta), "cpu")
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        trainable = tuple(p is not None and p.requires_grad for p in parameters)
        entries.append((trainable, torch.is_grad_enabled(), autocast, torch.get_default_dtype()))
        before = self._latest.entries
        if not before or not _same(before[:-1], entries[:-1]) or before[-1] != entries[-1]:
            self._latest = Snapshot(tuple(entries))
        return self._latest

    def difference(self, one: Snapshot, other: Snapshot) -> str:
        """Say where two snapshots differ."""
        changed = [name for (name, _), a, b in zip(self._modules, one.entries, other.entries, strict=False) if a != b]
        return f"the attributes of module {changed[0]!r}" if changed else "its modes"

    def _picture(self, name: str, module: nn.Module, pictures: dict[int, Hashable]) -> Hashable:
        holds = vars(module)
        values = tuple(holds.values())
        seen = self._seen.get(id(module))
        hooked = bool(
            module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or holds.get("_backward_pre_hooks")
        )
        if seen is not None and seen.settled and not hooked and _same(values, seen.values):
            return seen.picture
        own = attributes(module, self._stateful.get(name, ()))
        picture: Hashable = (
            type(module),
            module.training,
            tuple((key, frozen(value, pictures, objects=False)) for key, value in own.items()),
            hooks(module),
        )
        if seen is not None and seen.picture == picture:
            picture = seen.picture
        self._seen[id(module)] = _Seen(values, picture, not hooked and all(map(_settled, own.values())))
        return picture


def _same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    return len(these) == len(those) and all(map(operator.is_, these, those))


def _settled(value: Any) -> bool:
    """Whether a value's picture can change only when another object takes its place."""
    if isinstance(value, tuple):
        return all(map(_settled, value))
    return value is None or isinstance(value, (*_PLAIN, float)) or _by_identity(value)
