"""Python's and numpy's global generators, which all threads of a process share: their states, and seeding them for a module."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
from torch import nn

__all__ = ["HostStates", "Seeding", "seed_host"]


def seed_host(seed: int) -> None:
    """Seed Python's and numpy's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # the user's code draws from numpy's global generator


class Seeding:
    """Hooks: call ``k`` of a module begins with the generators at ``seeds[k]``, and leaves them as its caller had them."""

    def __init__(self, seeds: Mapping[int, int]) -> None:
        self.seeds, self.calls = seeds, 0
        self.callers: list[HostStates | None] = []

    def around(self, module: nn.Module) -> Callable[[], None]:
        """Hook into ``module``; the function returned takes the hooks away."""
        hooks = ExitStack()
        hooks.callback(module.register_forward_pre_hook(self._begin, prepend=True).remove)
        hooks.callback(module.register_forward_hook(self._end, always_call=True).remove)
        return hooks.close

    def _begin(self, module: nn.Module, args: Any) -> None:
        seed = self.seeds.get(self.calls)
        self.calls += 1
        self.callers.append(None if seed is None else HostStates())
        if seed is not None:
            seed_host(seed)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if (caller := self.callers.pop()) is not None:
            caller.restore()


class HostStates:
    """The states of Python's and numpy's global generators at one moment."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state(legacy=False)

    def restore(self) -> None:
        """Put them back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
