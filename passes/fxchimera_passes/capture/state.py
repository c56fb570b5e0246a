"""Leaves the model and the random generators as they were: whatever a recording changes is put back.

Attributes of every module are remembered one container deep (hooks, ``_buffers``, lists and dicts that a forward fills), so a
fake tensor that a forward cached does not stay behind.
"""

from __future__ import annotations

import copy
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from fxchimera_passes.hostrandom import HostStates

__all__ = [
    "Attributes",
    "changed_attributes",
    "generators_untouched",
    "holders",
    "model_untouched",
    "plain_state",
    "remembered",
    "without_cache",
]

_TABLES = ("_parameters", "_buffers", "_modules")
Attributes = dict[str, tuple[int, int | None]]


def plain_state(module: nn.Module) -> Attributes:
    """Fingerprint the Python attributes of ``module`` itself: identity, and length of containers."""
    return {
        name: (id(value), len(value) if isinstance(value, (list, dict, set, deque)) else None)
        for name, value in vars(module).items()
        if name not in _TABLES
    }


def changed_attributes(module: nn.Module, before: Mapping[str, tuple[int, int | None]]) -> tuple[str, ...]:
    """Return the names of attributes of ``module`` that differ from the fingerprint ``before``."""
    now = plain_state(module)
    return tuple(sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name)))


@contextmanager
def model_untouched(model: nn.Module, *, settle: bool = False) -> Iterator[None]:
    """Restore every module's attributes, and the containers in them, on the way out.

    With ``settle``, what a first call installs stays: hooks, and flags (attributes that are None, a bool or a string now).
    """
    restore = remembered(model, settle=settle)
    try:
        yield
    finally:
        restore()


def remembered(model: nn.Module, *, settle: bool = False) -> Callable[[], None]:
    """Note every module's attributes, and the containers in them; the function returned puts them back."""
    kept = [(holder, dict(vars(holder)), _containers(holder, hooks=not settle)) for holder in holders(model)]

    def restore() -> None:
        for holder, attributes, containers in kept:
            now = vars(holder)
            stays = {name for name, value in now.items() if settle and (value is None or isinstance(value, (bool, str)))}
            for name in now.keys() - attributes.keys() - stays:
                del now[name]
            now.update({name: value for name, value in attributes.items() if name not in stays})
            for original, contents in containers:
                _refill(original, contents)

    return restore


def holders(model: nn.Module) -> list[Any]:
    """Return the modules, and the plain objects that sit in their attributes (configurations, caches)."""
    found: dict[int, Any] = {}
    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            found[id(module)] = module
            found.update({id(value): value for value in vars(module).values() if _is_plain(value)})
    return list(found.values())


def _is_plain(value: Any) -> bool:
    no_state = (nn.Module, torch.Tensor, type, types.FunctionType, types.MethodType, types.ModuleType)
    return type(getattr(value, "__dict__", None)) is dict and not isinstance(value, no_state)


def _containers(holder: Any, *, hooks: bool) -> list[tuple[Any, Any]]:
    found = [value for name, value in vars(holder).items() if hooks or "hooks" not in name]
    return [(value, copy.copy(value)) for value in found if isinstance(value, (list, dict, set, deque))]


def _refill(original: Any, contents: Any) -> None:
    if isinstance(original, dict):
        same = list(original) == list(contents) and all(original[key] is value for key, value in contents.items())
    else:
        same = len(original) == len(contents) and all(a is b for a, b in zip(original, contents, strict=True))
    if same:
        return
    original.clear()
    if isinstance(original, (dict, set)):
        original.update(contents)
    else:
        original.extend(contents)


@contextmanager
def generators_untouched() -> Iterator[None]:
    """Restore torch's, Python's and numpy's random state; inside it is the same in every process."""
    states = HostStates()
    with torch.random.fork_rng(devices=[]):
        try:
            torch.default_generator.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            yield
        finally:
            states.restore()


@contextmanager
def without_cache(model: nn.Module, *, always: bool = False) -> Iterator[None]:
    """Set ``use_cache=False`` in the model's configurations, nested ones too, in training or ``always``; restored on the way out.

    Key-value caches are for generation: in training they double what crosses a cut and nobody reads them.
    """
    changed: list[Any] = []
    try:
        if model.training or always:
            for module in model.modules():
                _switch_off(getattr(module, "config", None), changed, 0)
        yield
    finally:
        for config in changed:
            config.use_cache = True


def _switch_off(config: Any, changed: list[Any], depth: int) -> None:
    if depth > 3 or not hasattr(config, "__dict__"):
        return
    if vars(config).get("use_cache") is True:
        config.use_cache = False
        changed.append(config)
    for value in vars(config).values():
        if type(value).__name__.endswith("Config"):
            _switch_off(value, changed, depth + 1)
