"""Which module is running: a stack of calls, each with its call number and its count of random operations.

The innermost call owns the random operations that run in it, so a dropout mask has one name wherever the cuts are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from fxchimera_passes.captured import RandomKey
from fxchimera_passes.keyed import HOST_ORDINAL

__all__ = ["Call", "Frames"]


@dataclass(slots=True)
class Call:
    """One running call of a module; ``opened`` tells that its inner calls are recorded."""

    module: nn.Module
    name: str
    number: int
    opened: bool = False
    drawn: int = 0


class Frames:
    """The stack of running module calls of one forward of ``root``."""

    def __init__(self, root: nn.Module) -> None:
        self._outside = Call(root, "", 0, opened=True)
        self.stack: list[Call] = []
        self.failed: nn.Module | None = None
        self._calls: Counter[str] = Counter()

    @contextmanager
    def enter(self, module: nn.Module, name: str, *, opened: bool) -> Iterator[Call]:
        """Run one call of ``module``; ``failed`` remembers the innermost opened module that an exception left."""
        call = Call(module, name, self._calls[name], opened)
        self._calls[name] += 1
        self.stack.append(call)
        try:
            yield call
        except Exception:
            if opened and self.failed is None:
                self.failed = module
            raise
        finally:
            self.stack.pop()

    @property
    def innermost(self) -> Call:
        """The innermost running call."""
        return self.stack[-1] if self.stack else self._outside

    @property
    def opened(self) -> Call:
        """The innermost running call whose module is opened."""
        return next((call for call in reversed(self.stack) if call.opened), self._outside)

    def draw(self) -> RandomKey:
        """Name the next random operation."""
        call = self.innermost
        key = RandomKey(call.name, call.number, call.drawn)
        call.drawn += 1
        return key

    def host_key(self) -> RandomKey:
        """Name what the innermost running call draws from Python's and numpy's generators."""
        return RandomKey(self.innermost.name, self.innermost.number, HOST_ORDINAL)

    def mark(self) -> tuple[Counter[str], int]:
        """Remember the counts of calls and draws, for :meth:`rewind`."""
        return self._calls.copy(), self.innermost.drawn

    def rewind(self, mark: tuple[Counter[str], int]) -> None:
        """Forget what was called and drawn since ``mark`` (an attempt that failed)."""
        self._calls, self.innermost.drawn = mark
