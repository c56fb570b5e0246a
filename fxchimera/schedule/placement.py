"""Which rank holds which stage, and which way each micro-batch goes.

    one_way(4, N)                   bidirectional(4, N)
    rank      0  1  2  3            rank      0  1  2  3
    down      0  1  2  3            down      0  1  2  3     (stage of the down pipe on that rank)
                                    up        3  2  1  0     (stage of the up pipe on that rank)

    v_shape(4, N)                   bidirectional_v(4, N)
    rank      0  1  2  3            rank      0  1  2  3
    down      0  1  2  3            down      0  1  2  3
              7  6  5  4                      7  6  5  4
                                    up        3  2  1  0
                                              4  5  6  7

The direction is a property of the micro-batch, so an action needs no pipe: ``2F0`` runs where micro-batch 0's pipe puts stage 2.
Shapes with several chunks a rank cut the model into that many times as many stages as there are ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxchimera.errors import ScheduleError

__all__ = ["Placement", "bidirectional", "bidirectional_v", "interleaved", "mirrored_pairs", "one_way", "v_shape"]


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
    def weight_copies(self) -> int:
        """The most ranks that hold one and the same stage."""
        return max(len({ranks[stage] for ranks in self.pipes}) for stage in range(self.num_stages))

    @property
    def chunks(self) -> int:
        """Stages of one pipe on a rank: 1, or 2 in a V."""
        return -(-self.num_stages // self.num_ranks)

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


def interleaved(num_ranks: int, chunks: int, n_microbatches: int) -> Placement:
    """Places stage s on rank s mod D, ``chunks`` stages a rank, one way (Megatron's virtual pipeline).

    Raises:
        ScheduleError: A number is below 1.
    """
    _positive(num_ranks, n_microbatches)
    if chunks < 1:
        raise ScheduleError(f"chunks must be at least 1, got {chunks}")
    return Placement(num_ranks * chunks, (tuple(range(num_ranks)) * chunks,), (0,) * n_microbatches)


def v_shape(num_ranks: int, n_microbatches: int) -> Placement:
    """Places stages r and 2D-1-r on rank r: the model goes down the ranks and comes back, one copy of the weights.

    Raises:
        ScheduleError: A number is below 1.
    """
    _positive(num_ranks, n_microbatches)
    return Placement(2 * num_ranks, (_v(num_ranks),), (0,) * n_microbatches)


def bidirectional_v(num_ranks: int, n_microbatches: int) -> Placement:
    """Two V shapes in opposite directions: stages r and 2D-1-r down, D-1-r and D+r up; two copies of the weights.

    One micro-batch, or one rank, leaves a single V.

    Raises:
        ScheduleError: A number is below 1.
    """
    _positive(num_ranks, n_microbatches)
    if num_ranks == 1 or n_microbatches == 1:
        return v_shape(num_ranks, n_microbatches)
    down = (n_microbatches + 1) // 2
    pipes = (_v(num_ranks), tuple(num_ranks - 1 - rank for rank in _v(num_ranks)))
    return Placement(2 * num_ranks, pipes, (0,) * down + (1,) * (n_microbatches - down))


def mirrored_pairs(num_stages: int, n_microbatches: int, pairs: int) -> Placement:
    """Several pairs of pipes (Chimera, section 3.6): pair k puts stage s on ranks s + k*D/f and D-1-s + k*D/f, modulo D.

    The micro-batches are dealt to the 2f pipes in equal parts, the rest one by one from the first; pipes left without a
    micro-batch are dropped.

    Raises:
        ScheduleError: A number is below 1, or the pairs do not divide D/2.
    """
    _positive(num_stages, n_microbatches)
    if pairs < 1 or (num_stages // 2) % pairs or num_stages % 2:
        raise ScheduleError(f"pairs={pairs} must divide half of the number of stages, which is {num_stages}/2")
    step = num_stages // pairs
    pipes = []
    for pair in range(pairs):
        pipes.append(tuple((stage + pair * step) % num_stages for stage in range(num_stages)))
        pipes.append(tuple((num_stages - 1 - stage + pair * step) % num_stages for stage in range(num_stages)))
    each, rest = divmod(n_microbatches, 2 * pairs)
    shares = [each + (pipe < rest) for pipe in range(2 * pairs)]
    kept = [(pipe, share) for pipe, share in zip(pipes, shares, strict=True) if share]
    return Placement(
        num_stages,
        tuple(pipe for pipe, _ in kept),
        tuple(number for number, (_, share) in enumerate(kept) for _ in range(share)),
    )


def _v(num_ranks: int) -> tuple[int, ...]:
    return (*range(num_ranks), *reversed(range(num_ranks)))


def _positive(num_stages: int, n_microbatches: int) -> None:
    for name, value in (("num_stages", num_stages), ("n_microbatches", n_microbatches)):
        if value < 1:
            raise ScheduleError(f"{name} must be at least 1, got {value}")
