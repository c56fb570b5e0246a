"""The ranks that save and load together: those of a pipeline, and those of the pipelines that share sharded parameters with it.

    mesh ("pp", "dp")      rank 0   rank 1     a pipeline: ranks 0 and 2; the first one writes
                           rank 2   rank 3     shares of one parameter: ranks 0 and 1

Each pipeline is a world of its own and knows of the others only what the parameters tell that the user has sharded over them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from fxchimera.runtime.processes.world import World
from fxchimera.runtime.sharded import is_sharded

__all__ = ["Peers"]


@dataclass(frozen=True, slots=True)
class Peers:
    """``first`` is the same on all ranks of a pipeline: of those that share parameters, this one writes; ``shared`` if any are."""

    world: World
    groups: tuple[dist.ProcessGroup, ...]
    first: bool
    shared: bool

    @classmethod
    def of(cls, world: World, owned: Iterable[torch.Tensor]) -> Peers:
        """Collective in each pipeline: find out from the parameters that this rank owns."""
        meshes = {id(mesh): mesh for mesh in (cast(Any, tensor).device_mesh for tensor in owned if is_sharded(tensor))}
        groups = {id(group): group for mesh in meshes.values() for group in mesh.get_all_groups()}
        first = not any(place for mesh in meshes.values() for place in mesh.get_coordinate() or ())
        everyone: list[tuple[bool, bool]] = world.gather_objects((first, bool(meshes)), "save() or load()")
        return cls(world, tuple(groups.values()), all(one for one, _ in everyone), any(shared for _, shared in everyone))

    def agree(self, problem: str | None) -> str | None:
        """Collective: return the first rank's problem on all ranks, None if nobody has one."""
        world = self.world
        everyone: list[str | None] = world.gather_objects(problem, "save() or load()")
        several = world.num_processes > 1
        texts = [f"rank {rank}: {text}" if several else text for rank, text in enumerate(everyone) if text is not None]
        found = texts[0] if texts else None
        if not self.shared:
            return found
        for group in self.groups:
            gathered: list[str | None] = [None] * dist.get_world_size(group)
            dist.all_gather_object(gathered, found, group=group)
            found = next((text for text in gathered if text is not None), None)
        return next((text for text in world.gather_objects(found, "save() or load()") if text is not None), None)
