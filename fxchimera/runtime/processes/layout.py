"""What the user asks for of the processes: how many pipelines, on which ranks of torch's, and how they lie on the nodes."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import get_args

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.grid import Grid
from fxchimera.runtime.processes.rankplacement import RankPlacement, rank_table

__all__ = ["Layout", "is_started", "own_node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Pipelines of ``num_ranks`` ranks: ``data_parallel`` ones if that is given, on all processes or on ``members`` of them."""

    num_ranks: int
    data_parallel: int | None = None
    placement: RankPlacement = "compact"
    members: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        num_ranks: int,
        data_parallel: int | None = None,
        placement: RankPlacement = "compact",
        device_mesh: DeviceMesh | None = None,
        pipeline_dim: str = "pp",
    ) -> Layout:
        """Read a layout off the arguments of ``pipeline()``.

        Raises:
            FxChimeraError: The mesh has no such dimension, or one of another size, or comes with what it decides itself.
        """
        if placement not in get_args(RankPlacement):
            raise FxChimeraError(f"rank_placement={placement!r}, but it can be {' or '.join(map(repr, get_args(RankPlacement)))}")
        if device_mesh is None:
            return cls(num_ranks=num_ranks, data_parallel=data_parallel, placement=placement)
        if data_parallel is not None or placement != "compact":
            raise FxChimeraError(
                "with device_mesh= the ranks of the pipeline and what the other dimensions mean are the caller's, so "
                "data_parallel= and rank_placement= cannot be given, too"
            )
        members = _members(device_mesh, pipeline_dim)
        if len(members) != num_ranks:
            raise FxChimeraError(
                f"num_stages={num_ranks}, but dimension {pipeline_dim!r} of device_mesh {device_mesh} has {len(members)} ranks"
            )
        if list(members) != sorted(members):
            raise FxChimeraError(
                f"dimension {pipeline_dim!r} of device_mesh lists the ranks {list(members)}; a pipeline's must ascend"
            )
        return cls(num_ranks=num_ranks, members=members)

    def width(self) -> int:
        """Return how many pipelines the processes make, be they joined already or only announced by torchrun.

        Raises:
            FxChimeraError: They make no whole number of pipelines, or another one than asked for.
        """
        if self.members is not None:
            return 1
        num_ranks, data_parallel = self.num_ranks, self.data_parallel
        joined = dist.is_initialized()
        found = dist.get_world_size() if joined else int(os.environ["WORLD_SIZE"])
        width, left = divmod(found, num_ranks)
        if left or width == 0 or data_parallel not in (None, width):
            rank = dist.get_rank() if joined else int(os.environ["RANK"])
            ranks = num_ranks * (data_parallel or 1)
            asked = f", data_parallel={data_parallel}" if data_parallel is not None else " a pipeline, and any number of pipelines"
            raise FxChimeraError(
                f"the schedule needs {ranks} ranks (num_stages={num_ranks}{asked}), but torch.distributed has a world of {found} "
                f"(this is rank {rank}); start with torchrun --nproc-per-node {ranks}, or pass num_stages={found}"
            )
        return width

    def grid(self, group: dist.ProcessGroup) -> Grid:
        """Collective: return which process of ``group`` runs what.

        Raises:
            FxChimeraError: The ranks cannot be placed as asked for.
        """
        nodes: list[str] = [""] * dist.get_world_size(group)
        if self.members is None:
            dist.all_gather_object(nodes, own_node(), group=group)
        return Grid(rank_table(len(nodes) // self.num_ranks, self.num_ranks, nodes, self.placement), dist.get_rank(group))

    def refuse_threads(self) -> None:
        """Refuse what threads of one process cannot be.

        Raises:
            FxChimeraError: Several pipelines are asked for.
        """
        width = self.data_parallel
        if width not in (None, 1):
            raise FxChimeraError(
                f"data_parallel={width} needs processes, each pipeline with a batch of its own; start with torchrun "
                f"--nproc-per-node {self.num_ranks * (width or 1)}. The threads of one process are one pipeline, which takes more "
                "micro-batches as well"
            )


def is_started() -> bool:
    """Whether ranks are processes: torch's default group exists, or torchrun has announced it."""
    return dist.is_available() and (dist.is_initialized() or ("RANK" in os.environ and "WORLD_SIZE" in os.environ))


def own_node() -> str:
    """Return a name for the node of this process: torchrun's number of its agent, SLURM's of the node, or the host's name."""
    numbers = [f"{name}={os.environ[name]}" for name in ("GROUP_RANK", "SLURM_NODEID") if name in os.environ]
    return numbers[0] if numbers else socket.gethostname()


def _members(mesh: DeviceMesh, name: str) -> tuple[int, ...]:
    """The ranks along a dimension of a mesh, which this rank is one of; a mesh of one dimension need not name it."""
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 and name not in names:
        raise FxChimeraError(
            f"device_mesh {mesh} has no dimension {name!r}; name it in init_device_mesh(..., mesh_dim_names=), pass "
            "pipeline_dim=, or pass the pipeline's own dimension of the mesh alone"
        )
    one = mesh if mesh.ndim == 1 else mesh[name]
    return tuple(int(rank) for rank in one.mesh.tolist())
