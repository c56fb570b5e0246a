"""What carries messages between processes: sockets through the host's memory, or a backend of torch's from device to device.

sockets    any device; on an accelerator the host waits for the copies
groups     torch's backend for the kind of device (NCCL for CUDA, gloo for the CPU), each process on a device of its own
    auto       what FXCHIMERA_TRANSPORT says, else groups on accelerators where that can be, else sockets: on the CPU they are
           faster than gloo
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, get_args

import torch
import torch.distributed as dist

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.devices.lanes import Lane
from fxchimera.runtime.messages.distributed import DistributedTransport
from fxchimera.runtime.messages.groupcircle import GroupCircle
from fxchimera.runtime.messages.grouptransport import GroupTransport
from fxchimera.runtime.messages.handover import landing
from fxchimera.runtime.messages.links import Links
from fxchimera.runtime.processes.backends import NO_BACKENDS, Backends
from fxchimera.runtime.processes.world import DistributedWorld, World
from fxchimera.runtime.transport import Channel, Transport

__all__ = ["TransportChoice", "choose_backend", "join_sums", "process_transport"]

TransportChoice = Literal["auto", "sockets", "groups"]
_Found = tuple[tuple[str, str] | None, str | None]  # host and device of a process, and its backend
_VARIABLE = "FXCHIMERA_TRANSPORT"
_HOST = torch.device("cpu")


def choose_backend(asked: TransportChoice, world: World) -> Backends:
    """Collective: return which of torch's backends carry messages, and sums over the pipelines, if any.

    Raises:
        FxChimeraError: ``asked`` is unknown, or "groups" cannot be.
    """
    wish = os.environ.get(_VARIABLE, asked) if asked == "auto" else asked
    if wish not in get_args(TransportChoice):
        where = f"transport={asked!r}" if wish == asked else f"{_VARIABLE}={wish}"
        raise FxChimeraError(f"{where}, but it can be {', '.join(map(repr, get_args(TransportChoice)))}")
    if not isinstance(world, DistributedWorld) or wish == "sockets" or (wish == "auto" and not world.devices.by_rank):
        return NO_BACKENDS
    device = world.devices.of(world.ranks[0]) or _HOST
    place = (socket.gethostname(), str(device)) if device != _HOST else None
    backend = _backend_for(device)
    found: list[_Found] = world.gather_objects((place, backend), "pipeline(transport=)")
    rows, columns = world.grid.processes, list(zip(*world.grid.processes, strict=True))
    reason = _obstacle(world, device, found, rows)
    if reason is not None and wish == "groups":
        raise FxChimeraError(f'transport="groups" is asked for, but {reason}; "sockets" goes through the host\'s memory')
    sums = world.grid.width > 1 and _obstacle(world, device, found, columns) is None
    return Backends(messages=backend if reason is None else None, sums=backend if sums else None)


def process_transport(
    rank: int, channels: Sequence[Channel], world: World, lane: Lane | None, room: Mapping[Channel, int] = MappingProxyType({})
) -> Transport:
    """Collective: what carries the messages of a rank that is a process; ``room`` as in :class:`DistributedTransport`."""
    sockets = DistributedTransport(rank, channels, world.failure, room)
    backend = world.backends.messages
    if backend is None:
        return landing(sockets, lane)
    assert isinstance(world, DistributedWorld), "threads hand tensors over themselves"
    try:
        links = Links(world, channels, None if lane is None else lane.device, backend)
    except BaseException:
        sockets.close()
        raise
    return GroupTransport(rank, channels, sockets, links, lane, world.failure, room)


def join_sums(world: World, lane: Lane | None) -> None:
    """Collective: let the sums over the pipelines go from device to device, where that was chosen."""
    if world.counterparts is not None and world.backends.sums is not None:
        assert isinstance(world, DistributedWorld), "threads are one pipeline"
        world.counterparts.through = GroupCircle(world, lane, world.backends.sums)


def _backend_for(device: torch.device) -> str | None:
    """The backend that torch, or whoever has registered one, names for a kind of device; None if there is none here."""
    try:
        backend = dist.get_default_backend_for_device(device)
    except ValueError:
        return None
    return backend if dist.is_backend_available(backend) else None


def _obstacle(
    world: DistributedWorld, device: torch.device, found: Sequence[_Found], groups: Iterable[Sequence[int]]
) -> str | None:
    """Say why there can be no groups of those processes, the same on all of them; None if there can."""
    for group in groups:
        first: dict[tuple[str, str], int] = {}
        for process in group:
            place, backend = found[process]
            if backend is None:
                return f"torch has no backend for {device.type} devices in process {process}"
            if place is not None and first.setdefault(place, process) != process:
                return f"the processes {first[place]} and {process} share {place[1]} of {place[0]}, which such a backend refuses"
    if world.apart and device != _HOST and dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None:
        return (
            "torch's default group was made with device_id=, so its groups are split off by all processes together, which those "
            "of device_mesh= need not be"
        )
    return None
