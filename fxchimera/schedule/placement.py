"""Which rank holds which stage, and which way each micro-batch goes.

    one_way(4, N)                   bidirectional(4, N)
    rank      0  1  2  3            rank      0  1  2  3
    down      0  1  2  3            down      0  1  2  3     (stage of the down pipe on that rank)
                                    up        3  2  1  0     (stage of the up pipe on that rank)

The direction is a property of the micro-batch, so an action needs no pipe: ``2F0`` runs where micro-batch 0's pipe puts stage 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxchimera.errors import ScheduleError

__all__ = ["Placement", "bidirectional", "one_way"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Ranks of the stages of every pipe, and the pipe of every micro-batch.

    Args:
        num_stages: Stages of the model.
        pipes: ``pipes[p][s]`` is the rank of stage s in pipe p; pipe 0 is the down pipe, pipe 1 the up pipe.
        pipe_of: ``pipe_of[m]`` is the pipe of micro-batch m.

    Raises:
        ScheduleError: A pipe has another number of stages, a micro-batch an unknown pipe, a pipe no micro-batch, or a rank no
            stage.
    """

    num_stages: int
    pipes: tuple[tuple[int, ...], ...]
    pipe_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_stages < 1 or not self.pipes:
            raise ScheduleError(f"a placement needs a stage and a pipe, got num_stages={self.num_stages}, {len(self.pipes)} pipes")
        for pipe, ranks in enumerate(self.pipes):
            if len(ranks) != self.num_stages:
                raise ScheduleError(f"pipe {pipe} places {len(ranks)} stages, the model has {self.num_stages}")
        if sorted(set(self.pipe_of)) != list(range(len(self.pipes))):
            raise ScheduleError(
                f"every pipe 0..{len(self.pipes) - 1} needs a micro-batch and no other may be used, got {self.pipe_of}"
            )
        held = sorted({rank for ranks in self.pipes for rank in ranks})
        if held != list(range(len(held))):
            raise ScheduleError(f"ranks must be 0, 1, 2, ... with at least one stage each, got {held}")

    @property
    def n_microbatches(self) -> int:
        """Micro-batches of one step, all pipes together."""
        return len(self.pipe_of)

    @property
    def num_ranks(self) -> int:
        """Ranks of one pipeline."""
        return 1 + max(max(ranks) for ranks in self.pipes)

    def rank(self, stage: int, microbatch: int) -> int:
        """The rank that runs a micro-batch's stage."""
        return self.pipes[self.pipe_of[microbatch]][stage]

    def replicas(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The (pipe, stage) pairs that a rank holds, the down pipe first."""
        return tuple((pipe, stage) for pipe, ranks in enumerate(self.pipes) for stage, held in enumerate(ranks) if held == rank)

    def microbatches(self, pipe: int) -> tuple[int, ...]:
        """The micro-batches that go through a pipe, ascending."""
        return tuple(microbatch for microbatch, of in enumerate(self.pipe_of) if of == pipe)

    def pipe_name(self, pipe: int) -> str:
        """``down`` or ``up``; further pairs of pipes are numbered (``down1``, ``up1``)."""
        return ("down", "up")[pipe % 2] + (str(pipe // 2) if pipe > 1 else "")


def one_way(num_stages: int, n_microbatches: int) -> Placement:
    """Places stage s on rank s; every micro-batch goes down.

    Raises:
        ScheduleError: A number is below 1.
    """
    _positive(num_stages, n_microbatches)
    return Placement(num_stages, (tuple(range(num_stages)),), (0,) * n_microbatches)


def bidirectional(num_stages: int, n_microbatches: int) -> Placement:
    """Places stage s on rank s for the first ceil(N/2) micro-batches and on rank D-1-s for the rest (Chimera, section 3.1).

    One micro-batch, or one stage, leaves a single pipe.

    Raises:
        ScheduleError: A number is below 1.
    """
    _positive(num_stages, n_microbatches)
    if num_stages == 1 or n_microbatches == 1:
        return one_way(num_stages, n_microbatches)
    down = (n_microbatches + 1) // 2
    pipes = (tuple(range(num_stages)), tuple(reversed(range(num_stages))))
    return Placement(num_stages, pipes, (0,) * down + (1,) * (n_microbatches - down))


def _positive(num_stages: int, n_microbatches: int) -> None:
    for name, value in (("num_stages", num_stages), ("n_microbatches", n_microbatches)):
        if value < 1:
            raise ScheduleError(f"{name} must be at least 1, got {value}")
