"""The one place where what torch.distributed keeps to itself is used, under names of ours; tried on torch 2.13.

``dist.new_group`` names a group that only its members make after its ranks and the number of groups that the process has, which is
not the same on the ends of a pipeline and in its middle; and groups made one after the other share their place in the store.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, distributed_c10d  # type: ignore[attr-defined]

__all__ = ["members_group", "named_group"]


def named_group(
    name: str,
    store: Store,
    ranks: Sequence[int],
    *,
    backend: str,
    timeout: datetime.timedelta,
    device: torch.device | None,
) -> dist.ProcessGroup:
    """Collective among ``ranks``, torch's numbers in ascending order: make a group whose members meet in ``store``.

    ``name`` is one that no other group of these processes has.
    """
    made = distributed_c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend),
        store,
        distributed_c10d.GroupName(name),
        timeout=timeout,
        device_id=device,
        group_desc="fxchimera",
    )
    group: dist.ProcessGroup = made[0]
    distributed_c10d._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return group


def members_group(ranks: Sequence[int], *, backend: str, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Collective among ``ranks``, which meet in the store of the default group, at a place that they have not had before."""
    ranks, store = sorted(ranks), distributed_c10d._get_default_store()
    name = f"fxchimera {ranks}"
    made = store.add(f"{name} of {dist.get_rank()}", 1)
    place = f"{name} {made}"
    return named_group(place, PrefixStore(place, store), ranks, backend=backend, timeout=timeout, device=None)
