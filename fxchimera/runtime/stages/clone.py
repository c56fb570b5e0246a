"""Structural clones of a stage's modules: the same code, hooks and settings, other parameter objects.

``functional_call`` on a shared module is not thread-safe and a second copy of a stage needs ``.grad`` of its own, so a mirror
replica gets its own module objects.  Parameters and buffers are never copied here: the caller says what stands in their place.
What the user sets on the originals later (attributes, hooks, the mode) is taken over before every call.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.settings import HOOK_TABLES, Snapshot, attributes, frozen, hooks
from fxchimera_passes._torch import compile_alike
from fxchimera_passes.whole import module_at

__all__ = ["Follower", "clone_modules", "set_by_name"]

_HOOK_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


def clone_modules(root: nn.Module, model: nn.Module, names: Iterable[str], memo: dict[int, Any]) -> None:
    """Put clones of ``model``'s submodules ``names`` under their own names into the skeleton ``root``.

    ``memo`` is deepcopy's: it maps ``id`` of a parameter or buffer of ``model`` to the tensor that takes its place (all others
    stay the model's own objects), and remembers what has been cloned, so that later calls share it.

    Raises:
        FxChimeraError: A module cannot be cloned; the message names it and its class.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        memo.setdefault(id(tensor), tensor)
    for name in sorted(names):
        original = module_at(model, name)
        inside = {id(child) for child in original.modules()}
        for child in original.modules():
            _share_hooks(child, inside, memo)
            for value in attributes(child).values():
                _share(value, memo)
        try:
            clone = copy.deepcopy(original, memo)
        except Exception as error:
            raise FxChimeraError(
                f"module {name!r} ({type(original).__name__}) cannot be cloned for the second pipeline: {error}. "
                'Use a schedule with one copy of each stage (schedule="1f1b"), or make the module deep-copyable'
            ) from error
        for theirs, ours in zip(original.modules(), clone.modules(), strict=True):
            compile_alike(theirs, ours)
        set_by_name(root, name, clone)


class Follower:
    """Keeps clones in step with what the user sets on the original modules."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._pairs: dict[int, tuple[nn.Module, nn.Module, set[int]]] = {}
        self._known: dict[int, dict[str, Hashable]] = {}
        self._hooks: dict[int, Hashable] = {}
        self._followed: Snapshot | None = None

    def add(self, original: nn.Module, clone: nn.Module) -> None:
        """Follow ``original``, of which ``clone`` has just been made, and the modules inside."""
        inside = {id(child) for child in original.modules()}
        for theirs, ours in zip(original.modules(), clone.modules(), strict=True):
            if id(theirs) not in self._pairs:
                self._pairs[id(theirs)] = theirs, ours, inside
                self._known[id(theirs)] = _pictures(theirs, {})
                self._hooks[id(theirs)] = hooks(theirs)
        self._followed = None

    def follow(self, present: Snapshot | None) -> None:
        """Take over what has changed since; nothing has if ``present``, the model's settings, is what was followed last."""
        if present is not None and present is self._followed:
            return
        self._followed = present
        seen: dict[int, Hashable] = {}
        for key, (theirs, ours, inside) in self._pairs.items():
            ours.training = theirs.training
            if (now := _pictures(theirs, seen)) != self._known[key]:
                self._take_over(theirs, ours, self._known[key], now)
                self._known[key] = now
            if (hooked := hooks(theirs)) != self._hooks[key]:
                self._rehook(theirs, ours, inside)
                self._hooks[key] = hooked

    def _take_over(self, theirs: nn.Module, ours: nn.Module, before: dict[str, Hashable], now: dict[str, Hashable]) -> None:
        for name in before.keys() - now.keys():
            vars(ours).pop(name, None)
        for name, value in attributes(theirs).items():
            if name not in before or now[name] != before[name]:
                self._memo.pop(id(value), None)  # a container whose content has changed
                _share(value, self._memo)
                vars(ours)[name] = copy.deepcopy(value, self._memo)

    def _rehook(self, theirs: nn.Module, ours: nn.Module, inside: set[int]) -> None:
        _share_hooks(theirs, inside, self._memo)
        for table in HOOK_TABLES:
            entries = vars(theirs).get(table) or {}
            setattr(ours, table, OrderedDict((k, copy.deepcopy(hook, self._memo)) for k, hook in entries.items()))
        for flags in _HOOK_FLAGS:
            setattr(ours, flags, OrderedDict(vars(theirs).get(flags) or {}))
        ours._is_full_backward_hook = theirs._is_full_backward_hook


def set_by_name(root: nn.Module, name: str, value: nn.Module | torch.Tensor) -> None:
    """Put a module, parameter or buffer under a qualified name, making the plain containers on the way to it."""
    *parents, last = name.split(".")
    holder = root
    for parent in parents:
        if parent not in holder._modules:
            holder.add_module(parent, nn.Module())
        holder = holder.get_submodule(parent)
    if isinstance(value, nn.Module):
        holder.add_module(last, value)
    elif isinstance(value, nn.Parameter):
        holder.register_parameter(last, value)
    else:
        holder._buffers[last] = value


def _pictures(module: nn.Module, seen: dict[int, Hashable]) -> dict[str, Hashable]:
    return {name: frozen(value, seen, objects=False) for name, value in attributes(module).items()}


def _share_hooks(module: nn.Module, inside: set[int], memo: dict[int, Any]) -> None:
    """Hooks are the user's objects and see both copies, unless they are methods of a module that is cloned itself."""
    for table in HOOK_TABLES:
        for hook in (getattr(module, table, None) or {}).values():
            if id(getattr(hook, "__self__", None)) not in inside:
                memo[id(hook)] = hook


def _share(value: Any, memo: dict[int, Any]) -> None:
    """Let all copies have one and the same: a configuration, so that a change reaches all, and a tensor that is no buffer."""
    if isinstance(value, torch.Tensor) or type(value).__name__.endswith("Config"):
        memo.setdefault(id(value), value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _share(item, memo)
    elif type(value) is dict:
        for item in value.values():
            _share(item, memo)
