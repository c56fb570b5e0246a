"""An order: what every rank does, one list a rank.

An order is a value (frozen, hashable, printable, readable).  It holds computations only as a family makes it, and messages too
once it is lowered.  Its CSV is torch's: one line a rank, one action a cell.

    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass

from fxchimera.errors import ScheduleError
from fxchimera.schedule.action import Action
from fxchimera.schedule.placement import Placement

__all__ = ["Order", "read_csv"]

_SHARDS = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD)")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Order:
    """The actions of every rank, in the order in which the rank runs them.

    Args:
        name: The family's name, for people.
        placement: Where the stages are and which way the micro-batches go.
        ranks: ``ranks[r]`` are the actions of rank r.

    Raises:
        ScheduleError: There is not exactly one list a rank.
    """

    name: str
    placement: Placement
    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != self.placement.num_ranks:
            raise ScheduleError(
                f"order {self.name!r} has {len(self.ranks)} lists of actions, its placement {self.placement.num_ranks} ranks"
            )

    def __str__(self) -> str:
        return self.to_csv()

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        return ((rank, action) for rank, actions in enumerate(self.ranks) for action in actions)

    @property
    def is_lowered(self) -> bool:
        """Whether the order holds messages."""
        return any(not action.kind.is_compute for _, action in self)

    @property
    def is_forward_only(self) -> bool:
        """Whether the order holds no backward."""
        return not any(action.kind.is_backward for _, action in self)

    def digest(self) -> str:
        """SHA-256 over name, placement and every action, in hexadecimal; ranks compare it before the first step."""
        place = self.placement
        text = repr((self.name, place.num_stages, place.pipes, place.pipe_of)) + "\n" + self.to_csv()
        return hashlib.sha256(text.encode()).hexdigest()

    def to_csv(self) -> str:
        """One line a rank in torch's text; P and G are ours, torch has no such actions."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.ranks)


def read_csv(text: str, placement: Placement, name: str = "csv") -> Order:
    """Reads one line a rank; also the compute-only files that torch's schedules write.

    Empty cells (torch's idle slots) are skipped, and so are torch's actions on sharded parameters (``0UNSHARD``, ``0RESHARD``,
    ``0REDUCE_GRAD``), which order nothing here.  torch's ``(0F7;7B3)OVERLAP_F_B`` becomes its two actions, one after the other.

    Raises:
        ScheduleError: A cell is no action, or the number of lines is not the number of ranks.
    """
    lines = list(csv.reader(io.StringIO(text)))
    while len(lines) > placement.num_ranks and not any(cell.strip() for cell in lines[-1]):
        lines.pop()
    if len(lines) != placement.num_ranks:
        raise ScheduleError(f"the CSV has {len(lines)} lines, one a rank, and the placement {placement.num_ranks} ranks")
    return Order(name, placement, tuple(tuple(_cells(line, rank)) for rank, line in enumerate(lines)))


def _cells(line: list[str], rank: int) -> Iterator[Action]:
    for column, cell in enumerate(line):
        overlap = _OVERLAP.fullmatch(cell.strip())
        for part in overlap[1].split(";") if overlap else [cell]:
            if not part.strip() or _SHARDS.fullmatch(part.strip()):
                continue
            try:
                yield Action.parse(part)
            except ScheduleError as error:
                raise ScheduleError(f"line {rank + 1}, column {column + 1} (rank {rank}): {error}") from None
