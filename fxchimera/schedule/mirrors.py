"""Who mirrors whose parameters: what parameters and gradients travel between ranks in a step, read off a cut and a placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fxchimera.schedule.placement import Placement
from fxchimera.schedule.profile import SyncEdge

__all__ = ["sync_edges"]


class _Stage(Protocol):
    """A stage by what it reads."""

    @property
    def index(self) -> int: ...

    @property
    def parameters(self) -> tuple[str, ...]: ...

    @property
    def buffers(self) -> tuple[str, ...]: ...


class _Cut(Protocol):
    """Stages, and the stage that owns each parameter."""

    @property
    def stages(self) -> Sequence[_Stage]: ...

    @property
    def owner(self) -> Mapping[str, int]: ...


def sync_edges(plan: _Cut, placement: Placement, sizes: Mapping[str, int]) -> tuple[SyncEdge, ...]:
    """List who mirrors whose parameters (or buffers), in one fixed order; ``sizes`` are the parameters' bytes."""
    edges = []
    for pipe, ranks in enumerate(placement.pipes):
        for stage, rank in zip(plan.stages, ranks, strict=True):
            shares: dict[int, int] = {}
            for name in stage.parameters:
                owner = placement.pipes[0][plan.owner[name]]
                shares[owner] = shares.get(owner, 0) + sizes[name]
            if pipe and stage.buffers:
                shares.setdefault(placement.pipes[0][stage.index], 0)
            edges += [SyncEdge(stage.index, rank, owner, size) for owner, size in sorted(shares.items()) if owner != rank]
    return tuple(edges)
