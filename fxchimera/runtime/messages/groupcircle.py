"""Sums over the pipelines on the devices themselves, through a group of torch's, in the same order as through the host.

    compute       ... the last gradient of a bucket --- event                        wait --- the sums
    sums                                             `-- wait  parts out and in, add, sums out and in --- event

See ``Circle`` in ``circle.py`` for the two rounds: a value is summed once, by one member, 0's part first, so all
members end with the same bits, and they are those that the host would compute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fxchimera.runtime.devices.lanes import Lane
from fxchimera.runtime.processes.circle import sum_by_parts
from fxchimera.runtime.processes.groups import destroy
from fxchimera.runtime.processes.world import DistributedWorld
from fxchimera_passes._torch import record_ranges

__all__ = ["GroupCircle"]


class GroupCircle:
    """Collective among all processes: the group of this one and its counterparts.

    Args:
        world: All processes.
        lane: This rank's streams; None on the CPU, where calls wait.
        backend: What moves the parts.
    """

    def __init__(self, world: DistributedWorld, lane: Lane | None, backend: str) -> None:
        self._world, self.lane = world, lane
        self._stream = None if lane is None else lane.accelerator.stream(lane.device)
        if lane is not None and self._stream is not None:
            lane.streams.append(self._stream)
        self._group: dist.ProcessGroup = world.call(lambda: self._open(backend))
        if lane is not None:
            world.failure.when_failed(self._group.abort)

    def sum(self, buffer: torch.Tensor) -> None:
        """Replace a flat buffer, whose length is a multiple of the number of members, by the sum over all members."""
        sum_by_parts(buffer, self._index, self._size, self._swap)

    def begin_sum(self, buffer: torch.Tensor) -> torch.Event:
        """Queue :meth:`sum` of a buffer on a device behind what the rank has computed; returns the event after which it is made."""
        lane, stream = self.lane, self._stream
        assert lane is not None, "on the CPU a thread calls sum()"
        assert stream is not None, "a lane has a stream for sums"
        lane.accelerator.wait(stream, lane.accelerator.event(lane.compute))
        lane.accelerator.use(stream)
        try:
            self.sum(buffer)
            done = lane.accelerator.event(stream)
        finally:
            lane.accelerator.use(lane.compute)
        lane.accelerator.keep(buffer, stream)  # after a failure nobody comes to end_sum()
        return done

    def end_sum(self, done: torch.Event) -> None:
        """Let the rank's stream wait for a sum."""
        assert self.lane is not None, "on the CPU a thread calls sum()"
        self.lane.accelerator.wait(self.lane.compute, done)

    def close(self) -> None:
        """Leave the group; may be called once."""
        with contextlib.suppress(RuntimeError):  # from an aborted one
            destroy(self._group)

    def _swap(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        """Send ``outgoing[i]`` to member i and receive ``incoming[i]`` from it, for all others, in one batch."""
        others = [other for other in range(self._size) if other != self._index]
        moves = [dist.P2POp(dist.isend, outgoing[other], group=self._group, group_peer=other) for other in others]
        moves += [dist.P2POp(dist.irecv, incoming[other], group=self._group, group_peer=other) for other in others]
        record_ranges(False)  # as for the groups of fxchimera/runtime/processes/groups.py
        try:
            works = dist.batch_isend_irecv(moves)
        finally:
            record_ranges(True)
        for work in works:
            work.wait()

    def _open(self, backend: str) -> dist.ProcessGroup:
        grid, device = self._world.grid, None if self.lane is None else self.lane.device
        if device is not None:
            torch.accelerator.set_device_index(device.index)  # of this thread
        groups = [
            self._world.new_group([row[rank] for row in grid.processes], backend=backend, device=device)
            for rank in range(grid.depth)
        ]
        (group,) = (group for group in groups if group is not None)
        byte = torch.zeros(grid.width, dtype=torch.uint8, device=device or torch.device("cpu"))
        self._group, self._index, self._size = group, dist.get_rank(group), grid.width
        self.sum(byte)  # the first use connects
        return group
