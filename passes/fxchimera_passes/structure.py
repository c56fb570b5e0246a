"""Take the tensors out of any Python object and put others in their place.

torch's pytree sees registered containers only; real models pass dataclasses, ``ModelOutput``, caches and objects with
``__slots__`` between their layers, so a :class:`Structure` walks those too::

    {"x": T0, "state": Cache(keys=[T1])}  ->  [T0, T1]  +  Mapping("x": Leaf(0), "state": Object(Cache, keys=Sequence(Leaf(1))))
"""

from __future__ import annotations

import collections
import enum
import functools
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["Path", "Structure", "flatten", "follow"]

Path: TypeAlias = tuple[tuple[str, Any], ...]
"""How to reach a tensor: ("item", key) and ("attribute", name) steps from the outside in."""

_OPAQUE = (
    nn.Module, type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, types.GeneratorType,
    functools.partial, torch.Generator, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
    int, float, complex, bool, str, bytes, range, enum.Enum, set, frozenset, BaseException,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Leaf:
    """The ``index``-th tensor."""

    index: int


@dataclass(frozen=True, slots=True)
class _Constant:
    """A value without tensors, kept as it is."""

    value: Any


@dataclass(frozen=True, slots=True)
class _Seen:
    """The ``index``-th container of this structure once more (shared or cyclic)."""

    index: int


@dataclass(frozen=True, slots=True)
class _Container:
    """A container or object of type ``kind``: ``steps[i]`` leads to ``parts[i]``.

    ``extra`` is what its construction needs besides: the default factory of a defaultdict, the maxlen of a deque.
    """

    kind: type
    index: int
    steps: tuple[tuple[str, Any], ...]
    parts: tuple[Any, ...]
    extra: Any = None


@dataclass(frozen=True, slots=True)
class Structure:
    """The shape of an object without its tensors; ``rebuild(tensors)`` makes a fresh object with these tensors in it."""

    spec: Any
    count: int

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Make a new object of this structure that holds ``tensors`` (``count`` of them, in flatten order)."""
        if len(tensors) != self.count:
            raise ValueError(f"the structure holds {self.count} tensors, {len(tensors)} were given")
        return _build(self.spec, tensors, {})

    def picture(self, frozen: Callable[[Any], Hashable]) -> Hashable:
        """Return a hashable value, equal for equal structures, that holds what ``frozen`` makes of values that are no tensors."""
        return _picture(self.spec, frozen)

    def paths(self) -> list[Path]:
        """Return where each tensor sits, in flatten order."""
        found: dict[int, Path] = dict(_paths(self.spec, ()))
        return [found[index] for index in range(self.count)]

    def constants(self) -> list[tuple[Path, Any]]:
        """Return where each value sits that is no tensor and holds none, and the value."""
        return list(_constants(self.spec, ()))


def follow(value: Any, path: Path) -> Any:
    """Walk from ``value`` along ``path``."""
    for kind, key in path:
        value = value[key] if kind == "item" else getattr(value, key)
    return value


def flatten(value: Any, *, fresh: bool = False) -> tuple[list[torch.Tensor], Structure]:
    """Return the tensors inside ``value``, in a fixed order, and the structure around them.

    A tensor that occurs twice is returned twice.  Objects without any tensor stay the object they are, unless ``fresh`` asks
    for new ones (a cache that a call will fill).
    """
    walk = _Walk(fresh)
    spec = walk.describe(value)
    return walk.tensors, Structure(spec, len(walk.tensors))


class _Walk:
    """One pass over an object: collects its tensors and numbers its containers."""

    def __init__(self, fresh: bool) -> None:
        self.fresh = fresh
        self.tensors: list[Tensor] = []
        self.seen: dict[int, int] = {}
        self.outermost = 0

    def describe(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return _Leaf(len(self.tensors) - 1)
        if value is None or _is_opaque(value):
            return _Constant(value)
        if id(value) in self.seen:
            self.outermost = min(self.outermost, self.seen[id(value)])
            return _Seen(self.seen[id(value)])
        steps = _steps(value)
        if steps is None:
            return _Constant(value)
        index, first = len(self.seen), len(self.tensors)
        self.seen[id(value)] = index
        around, self.outermost = self.outermost, index
        parts = tuple(self.describe(_part(value, step)) for step in steps)
        closed = self.outermost >= index  # nothing inside points to a container around this one
        self.outermost = min(around, self.outermost)
        plain = isinstance(value, (tuple, list, dict, slice))
        if len(self.tensors) == first and closed and not plain and not self.fresh:
            self.seen = {key: number for key, number in self.seen.items() if number < index}
            return _Constant(value)
        return _Container(type(value), index, tuple(steps), parts, _extra(value))


def _is_opaque(value: Any) -> bool:
    kind = type(value)
    return (
        isinstance(value, _OPAQUE)
        or kind.__module__.partition(".")[0] in ("numpy", "logging", "threading", "_thread", "re", "weakref")
        or kind.__name__.endswith("Config")
    )


def _steps(value: Any) -> list[tuple[str, Any]] | None:
    """List the steps into ``value``, None when it cannot be walked."""
    if isinstance(value, (tuple, list, collections.deque)):
        return [("item", index) for index in range(len(value))]
    if isinstance(value, slice):
        return [("attribute", name) for name in ("start", "stop", "step")]
    attributes: list[tuple[str, Any]] = [("attribute", name) for name in _attribute_names(value)]
    if isinstance(value, dict):
        own = [] if _attributes_mirror_items(value) else attributes
        return [("item", key) for key in value] + own
    return attributes if attributes or hasattr(value, "__dict__") else None


def _attributes_mirror_items(value: dict[Any, Any]) -> bool:
    """Tell whether a dict subclass shows its items as attributes too (``ModelOutput``): they are set together."""
    names = vars(value) if hasattr(value, "__dict__") else {}
    return bool(names) and all(name in value and value[name] is item for name, item in names.items() if item is not None)


def _attribute_names(value: Any) -> list[str]:
    names = list(vars(value)) if hasattr(value, "__dict__") else []
    for base in type(value).__mro__:
        slots = getattr(base, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__weakref__", "__dict__", *names) and hasattr(value, name):
                names.append(name)
    return names


def _part(value: Any, step: tuple[str, Any]) -> Any:
    kind, key = step
    if kind == "attribute":
        return getattr(value, key)
    return dict.__getitem__(value, key) if isinstance(value, dict) else value[key]


def _extra(value: Any) -> Any:
    if isinstance(value, collections.defaultdict):
        return value.default_factory
    if isinstance(value, collections.deque):
        return value.maxlen
    if isinstance(value, dict) and hasattr(value, "__dict__") and _attributes_mirror_items(value):
        return tuple(vars(value))
    return None


def _build(spec: Any, tensors: Sequence[Tensor], made: dict[int, Any]) -> Any:
    if isinstance(spec, _Leaf):
        return tensors[spec.index]
    if isinstance(spec, _Constant):
        return spec.value
    if isinstance(spec, _Seen):
        return made[spec.index]
    build: Callable[[_Container, Sequence[Tensor], dict[int, Any]], Any] = _build_object
    if issubclass(spec.kind, (tuple, slice)):
        build = _build_fixed
    elif issubclass(spec.kind, (list, collections.deque)):
        build = _build_list
    elif issubclass(spec.kind, dict):
        build = _build_dict
    return build(spec, tensors, made)


def _build_fixed(spec: _Container, tensors: Sequence[Tensor], made: dict[int, Any]) -> Any:
    values = [_build(part, tensors, made) for part in spec.parts]
    if spec.kind is slice:
        return slice(*values)
    if hasattr(spec.kind, "_fields"):
        return tuple.__new__(spec.kind, values)
    try:
        return spec.kind(values)
    except TypeError:  # torch.return_types and the like take other arguments
        return tuple(values)


def _build_list(spec: _Container, tensors: Sequence[Tensor], made: dict[int, Any]) -> Any:
    new: Any = collections.deque(maxlen=spec.extra) if spec.kind is collections.deque else _blank(spec.kind)
    made[spec.index] = new
    new.extend(_build(part, tensors, made) for part in spec.parts)
    return new


def _build_dict(spec: _Container, tensors: Sequence[Tensor], made: dict[int, Any]) -> Any:
    if issubclass(spec.kind, collections.defaultdict):
        new: Any = spec.kind(spec.extra)
    else:
        new = _blank(spec.kind)
    made[spec.index] = new
    # past any __setitem__ of a subclass, which may refuse keys or write elsewhere
    put = collections.OrderedDict.__setitem__ if isinstance(new, collections.OrderedDict) else dict.__setitem__
    for (kind, key), part in zip(spec.steps, spec.parts, strict=True):
        value = _build(part, tensors, made)
        if kind == "item":
            put(new, key, value)
        else:
            object.__setattr__(new, key, value)
    if isinstance(spec.extra, tuple):
        vars(new).update({name: dict.get(new, name) for name in spec.extra})
    return new


def _blank(kind: Any) -> Any:
    """Make an object of ``kind`` without running its constructor."""
    return kind.__new__(kind)


def _build_object(spec: _Container, tensors: Sequence[Tensor], made: dict[int, Any]) -> Any:
    new = _blank(spec.kind)
    made[spec.index] = new
    for (_, name), part in zip(spec.steps, spec.parts, strict=True):
        object.__setattr__(new, name, _build(part, tensors, made))
    return new


def _picture(spec: Any, frozen: Callable[[Any], Hashable]) -> Hashable:
    if isinstance(spec, _Leaf):
        return spec.index
    if isinstance(spec, _Constant):
        return "value", frozen(spec.value)
    if isinstance(spec, _Seen):
        return "seen", spec.index
    keys: Hashable = len(spec.steps)
    if not issubclass(spec.kind, (tuple, list, collections.deque)):
        keys = tuple((how, frozen(key)) for how, key in spec.steps)
    return spec.kind, spec.index, keys, frozen(spec.extra), tuple(_picture(part, frozen) for part in spec.parts)


def _paths(spec: Any, path: Path) -> Iterator[tuple[int, Path]]:
    if isinstance(spec, _Leaf):
        yield spec.index, path
    elif isinstance(spec, _Container):
        for step, part in zip(spec.steps, spec.parts, strict=True):
            yield from _paths(part, (*path, step))


def _constants(spec: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(spec, _Constant):
        yield path, spec.value
    elif isinstance(spec, _Container):
        for step, part in zip(spec.steps, spec.parts, strict=True):
            yield from _constants(part, (*path, step))
