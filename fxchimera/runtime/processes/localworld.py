"""The world when every rank is a thread of one process: what is gathered or spread is there already."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fxchimera.runtime.devices.devices import HOST
from fxchimera.runtime.failures.failure import Failure, Limits
from fxchimera.runtime.grid import Grid
from fxchimera.runtime.processes.backends import NO_BACKENDS
from fxchimera.runtime.processes.width import Width

__all__ = ["LocalWorld"]


class LocalWorld:
    """Every rank is a thread of this process."""

    def __init__(self, num_ranks: int, limits: Limits) -> None:
        self.grid = Grid.of_threads(num_ranks)
        self.counterparts: Width | None = None
        self.ranks = tuple(range(num_ranks))
        self.process = 0
        self.num_processes = 1
        self.devices = HOST
        self.failure = Failure(limits, self.grid)
        self.backends = NO_BACKENDS

    def gather(self, value: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Return the only process's value."""
        return [value]

    def gather_objects(self, value: Any, what: str) -> list[Any]:
        """Return the only process's value."""
        return [value]

    def gather_in_pipeline(self, value: Any, what: str) -> list[Any]:
        """Return the only process's value."""
        return [value]

    def collect(self, value: Any, what: str) -> list[Any]:
        """Return the only process's value."""
        return [value]

    def spread(self, value: Any, what: str) -> Any:
        """Return the only process's value."""
        return value

    def column(self) -> dist.ProcessGroup | None:
        """There is no such group."""
        return None

    def part(self) -> None:
        """Nobody to wait for."""

    def close(self) -> None:
        """Nothing to release."""
