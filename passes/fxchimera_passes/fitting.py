"""Cuts that fit into the memory of the ranks.

A stage's memory is its parameters, what training adds to them, and the activations of the micro-batches that it holds in flight:

    bytes(stage) = parameters + state * trainable parameters + in_flight * saved

With one stage a rank that is a limit on each run of atoms, and where the stages s and S-1-s share a rank a limit on their sum; both
are kept exactly.  Elsewhere each stage is given its part of the rank.  What tied parameters and messages add is known of a whole
cut only; so cuts are proposed here, and judged as they are by ``Room.excess``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fxchimera_passes.atoms import Atoms
from fxchimera_passes.balance import cut
from fxchimera_passes.errors import PartitionError
from fxchimera_passes.mirrored import Limit, cut_mirrored
from fxchimera_passes.plan import Stage

__all__ = ["Room", "Share", "candidates"]

_HALVINGS = 24
_SLACKS = (0.05, 0.0)
_MOST_MIRRORED = 600  # atoms; the search takes seconds beyond


@dataclass(frozen=True, slots=True)
class Share:
    """What one stage asks of a rank: bytes for a byte of a parameter, more for one that is trained, and for one that is saved."""

    stage: int
    parameter: float
    trainable: float
    saved: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What the stages of a cut may hold, as the caller's schedule places them.

    ``ranks`` are the bytes of each rank and the stages it holds; ``excess`` returns needed over allowed bytes of the tightest rank:
    at most 1 fits.  ``refusal`` tells in words what does not fit and what to do.
    """

    ranks: tuple[tuple[float, tuple[Share, ...]], ...]
    excess: Callable[[Sequence[Stage]], float]
    refusal: Callable[[Sequence[Stage]], str]

    def overrun(self, stages: Sequence[Stage]) -> float:
        """How far beyond the caps the stages are, as a share of the cap; 0 when they fit."""
        return max(0.0, self.excess(stages) - 1.0)


def candidates(atoms: Atoms, counts: Sequence[int], empty: int, room: Room) -> Iterator[tuple[int, ...]]:
    """Cuts into the stages from ``empty`` on that are likely to fit: the most even ones, and the roomiest."""
    heaviest: dict[int, tuple[float, Share, int]] = {}  # by stage the rank where it asks most
    for cap, shares in room.ranks:
        for share in shares:
            if share.stage not in heaviest or share.trainable > heaviest[share.stage][1].trainable:
                heaviest[share.stage] = cap / len(shares), share, len(shares)
    chosen = [heaviest[stage] for stage in range(empty, len(heaviest))]
    sizes, caps = [_sizes(atoms, share) for _, share, _ in chosen], [cap for cap, _, _ in chosen]
    for slack in _SLACKS:
        found = _cut(atoms, len(caps), counts, sizes, caps, slack)
        if found is not None:
            yield found
    yield _roomiest(atoms, len(caps), counts, sizes, caps)
    limits = _limits(atoms, len(heaviest), room)
    if limits and not empty and len(atoms.starts) <= _MOST_MIRRORED:
        mirrored = cut_mirrored(atoms.seconds, counts, limits)
        if mirrored is not None:
            yield mirrored


def _limits(atoms: Atoms, stages: int, room: Room) -> list[list[Limit]]:
    """The limits of the pairs s and S-1-s, the outermost first; nothing when ranks are shared in another way."""
    found: list[list[Limit]] = [[] for _ in range(stages // 2)]
    for cap, shares in room.ranks:
        first, last = min(shares, key=lambda s: s.stage), max(shares, key=lambda s: s.stage)
        if len(shares) != 2 or first.stage + last.stage != stages - 1:
            return []
        found[first.stage].append(Limit(_sizes(atoms, first), _sizes(atoms, last), cap))
    return found


def _sizes(atoms: Atoms, share: Share) -> list[float]:
    rows = zip(atoms.parameter_bytes, atoms.trainable_bytes, atoms.saved_bytes, strict=True)
    return [
        share.parameter * parameters + share.trainable * trainable + share.saved * saved for parameters, trainable, saved in rows
    ]


def _cut(
    atoms: Atoms, parts: int, counts: Sequence[int], sizes: Sequence[Sequence[float]], caps: Sequence[float], slack: float
) -> tuple[int, ...] | None:
    try:
        return cut(atoms.seconds, parts, crossing=atoms.crossing, counts=counts, sizes=sizes, caps=caps, slack=slack).positions
    except PartitionError:
        return None


def _roomiest(
    atoms: Atoms, parts: int, counts: Sequence[int], sizes: Sequence[Sequence[float]], caps: Sequence[float]
) -> tuple[int, ...]:
    """The cut whose tightest stage needs the least part of its cap, to a millionth."""
    low, high = 0.0, max(sum(row) / cap for row, cap in zip(sizes, caps, strict=True))
    best: tuple[int, ...] | None = None
    for _ in range(_HALVINGS):
        middle = high if best is None else (low + high) / 2
        found = _cut(atoms, parts, counts, sizes, [middle * cap for cap in caps], 0.0)
        if found is not None:
            best, high = found, middle
        elif best is None:
            high = 2 * high or 1.0
        else:
            low = middle
    assert best is not None  # with room for everything in every stage, the balancer has cut before
    return best
