"""Which process runs which rank of which pipeline: the W x D processes of one training run.

                 rank 0   rank 1   rank 2   rank 3
pipeline 0          0        1        2        3         one pipeline: these see one shard of the batch
pipeline 1          4        5        6        7
                    |
                    counterparts: these hold the same stages
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Grid"]


@dataclass(frozen=True, slots=True)
class Grid:
    """``processes[w][r]`` runs rank ``r`` of pipeline ``w``; ``process`` is this one.  Process 0 is rank 0 of pipeline 0."""

    processes: tuple[tuple[int, ...], ...]
    process: int

    @classmethod
    def of_threads(cls, num_ranks: int) -> Grid:
        """One pipeline whose ranks are threads of one process."""
        return cls(((0,) * num_ranks,), 0)

    @property
    def width(self) -> int:
        """The number of pipelines (W)."""
        return len(self.processes)

    @property
    def depth(self) -> int:
        """The number of ranks of a pipeline (D)."""
        return len(self.processes[0])

    def place_of(self, process: int) -> tuple[int, int]:
        """The pipeline that a process belongs to, and the (first) rank that it runs there."""
        return next((w, row.index(process)) for w, row in enumerate(self.processes) if process in row)

    @property
    def pipeline(self) -> int:
        """The pipeline that this process belongs to."""
        return self.place_of(self.process)[0]

    @property
    def rank(self) -> int:
        """The (first) rank that this process runs."""
        return self.place_of(self.process)[1]

    @property
    def row(self) -> tuple[int, ...]:
        """The processes of this process's pipeline, by rank."""
        return self.processes[self.pipeline]
