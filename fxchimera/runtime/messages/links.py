"""torch's process groups that carry messages: one of two ranks for every channel, made and first used by all in one order.

NCCL knows no tags, and what is queued on one group between two ranks goes in the order it was queued, sends and receives alike.  A
group of its own lets a channel wait without keeping another waiting, and its order is the one that the proof has checked.

    channel (0, 1, down-F)     group {0, 1}, rank 0 sends one byte, rank 1 receives it
    channel (1, 0, down-B)     group {0, 1}, another one, the other way; and so on, the same list on every rank
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fxchimera.runtime.processes.groups import destroy
from fxchimera.runtime.processes.world import DistributedWorld
from fxchimera.runtime.transport import Channel
from fxchimera_passes._torch import record_ranges

__all__ = ["Link", "Links"]

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Link:
    """One rank's end of a channel: a group of two, and which of them the other is."""

    group: dist.ProcessGroup
    peer: int

    def send(self, buffer: torch.Tensor) -> dist.Work:
        """Begin to send a dense tensor, which stays as it is until the work is done; on an accelerator after the current stream."""
        record_ranges(False)  # as for the groups of fxchimera/runtime/processes/groups.py
        try:
            return _begun(dist.isend(buffer, group=self.group, group_dst=self.peer))
        finally:
            record_ranges(True)

    def receive(self, buffer: torch.Tensor) -> dist.Work:
        """Begin to receive into a dense tensor."""
        record_ranges(False)
        try:
            return _begun(dist.irecv(buffer, group=self.group, group_src=self.peer))
        finally:
            record_ranges(True)


class Links:
    """Collective among all processes: the groups of the ``channels`` of every pipeline, of which this process keeps its own.

    Args:
        world: All processes; the calls are made on its helper thread, so another rank's failure ends the wait for it.
        channels: The channels of a pipeline, the same list everywhere.
        device: Where this process's tensors are; None for the CPU.
        backend: What moves them.

    Raises:
        PipelineError: Another rank failed, or a group could not be made.
    """

    def __init__(self, world: DistributedWorld, channels: Sequence[Channel], device: torch.device | None, backend: str) -> None:
        self._world, self._device, self._backend = world, device, backend
        self._links: dict[Channel, Link] = {}
        world.call(lambda: self._open(channels))
        if device is not None:
            world.failure.when_failed(self.abort)

    def __getitem__(self, channel: Channel) -> Link:
        """This rank's end of a channel."""
        return self._links[channel]

    def abort(self) -> None:
        """End what the groups are at, after a failure, so that no device waits for a rank that is gone."""
        for link in self._links.values():
            with contextlib.suppress(Exception):  # it may have ended by itself
                link.group.abort()

    def close(self) -> None:
        """Close the connections; may be called more than once."""
        links, self._links = self._links, {}
        for link in links.values():
            with contextlib.suppress(RuntimeError):  # from an aborted one
                destroy(link.group)

    def _open(self, channels: Sequence[Channel]) -> None:
        world, grid, device = self._world, self._world.grid, self._device
        if device is not None:
            torch.accelerator.set_device_index(device.index)  # of this thread
        for row in grid.processes:
            for channel in channels:
                ends = [row[rank] for rank in channel[:2]]
                group = world.new_group(ends, backend=self._backend, device=device)
                if group is not None:
                    self._links[channel] = Link(group, 1 - dist.get_rank(group))
        for channel in channels:
            if channel in self._links:
                self._exercise(channel)
        if device is not None:
            torch.accelerator.synchronize(device)

    def _exercise(self, channel: Channel) -> None:
        """Use a channel once: some backends connect at the first use, which waits for the other rank."""
        byte, link = torch.zeros(1, dtype=torch.uint8, device=self._device or _HOST), self._links[channel]
        (link.send if channel[0] == self._world.grid.rank else link.receive)(byte).wait()


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "only members of a group have its link"
    return work
