"""Structural clones of a stage's modules: the same code, hooks and settings, other parameter objects.

``functional_call`` on a shared module is not thread-safe and a second copy of a stage needs ``.grad`` of its own, so a mirror
replica gets its own module objects.  Parameters and buffers are never copied here: the caller says what stands in their place.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fxchimera.errors import FxChimeraError

__all__ = ["clone_modules", "set_by_name"]

_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


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
        original = model.get_submodule(name)
        _share_hooks(original, memo)
        _share_configurations(original, memo)
        try:
            clone = copy.deepcopy(original, memo)
        except Exception as error:
            raise FxChimeraError(
                f"module {name!r} ({type(original).__name__}) cannot be cloned for the second pipeline: {error}. "
                'Use a schedule with one copy of each stage (schedule="1f1b"), or make the module deep-copyable'
            ) from error
        set_by_name(root, name, clone)


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


def _share_hooks(module: nn.Module, memo: dict[int, Any]) -> None:
    """Hooks are the user's objects and see both copies, unless they are methods of a module that is cloned itself."""
    inside = {id(child) for child in module.modules()}
    for child in module.modules():
        for table in _HOOK_TABLES:
            for hook in (getattr(child, table, None) or {}).values():
                if id(getattr(hook, "__self__", None)) not in inside:
                    memo[id(hook)] = hook


def _share_configurations(module: nn.Module, memo: dict[int, Any]) -> None:
    """A configuration object (the ``config`` of transformers' modules) stays one for all copies, so a later change reaches all."""
    for child in module.modules():
        config = getattr(child, "config", None)
        if type(config).__name__.endswith("Config"):
            memo[id(config)] = config
