"""Where a rank stands among several pipelines, as a user's data loader and optimizer want to know it."""

from __future__ import annotations

import torch.distributed as dist

from fxchimera.runtime.processes.world import World

__all__ = ["DataParallel"]


class DataParallel:
    """The data-parallel side of a pipeline; every pipeline of the W is given its own shard of a batch."""

    _world: World

    @property
    def data_parallel_size(self) -> int:
        """The number of pipelines (W): ``num_replicas`` for torch's ``DistributedSampler``."""
        return self._world.grid.width

    @property
    def data_parallel_rank(self) -> int:
        """The number of this rank's pipeline, 0 to W - 1: ``rank`` for torch's ``DistributedSampler``."""
        return self._world.grid.pipeline

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """Torch's group of the W ranks that own the same parameters, by pipeline; None when ranks are threads.

        It is made at the first use, by all ranks, and lives until ``close``.  For torch's ``ZeroRedundancyOptimizer``, which
        shards the optimizer's state over the pipelines (ZeRO-1)::

            optimizer = ZeroRedundancyOptimizer(
                pipe.parameters(), optimizer_class=torch.optim.AdamW, process_group=pipe.data_parallel_group, lr=1e-3
            )
        """
        return self._world.column()
