"""torch's process groups: made from torchrun's environment, and destroyed; and pairs of ranks with a connection of their own."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from fxchimera.errors import FxChimeraError

__all__ = ["announce", "announced", "begin_announcing", "connect", "destroy", "join", "open_devices"]

_NAME_BYTES = 96
_PACKET_BYTES = 1024
_INTERFACES = "GLOO_SOCKET_IFNAME"  # torch's own variable


def join(timeout: datetime.timedelta) -> Callable[[], None]:
    """Make torch's default group from torchrun's environment; returns what destroys it.

    It may be made and destroyed any number of times in one process.  torchrun's store keeps the addresses of a group that was
    destroyed, and the next group would wait for ever at these, so each gets a prefix of its own, by a count that the store keeps
    for each rank.  torch wraps ``sys.excepthook`` each time; that is undone.
    """
    before = sys.excepthook
    store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    store.set_timeout(timeout)
    made = store.add(f"fxchimera/groups of rank {rank}", 1)
    dist.init_process_group("gloo", store=PrefixStore(f"fxchimera/{made}", store), rank=rank, world_size=size, timeout=timeout)
    wrapped = sys.excepthook

    def leave() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        if sys.excepthook is wrapped:
            sys.excepthook = before

    return leave


def announce(what: str, value: torch.Tensor | None, size: int, group: dist.ProcessGroup) -> list[torch.Tensor] | None:
    """Collective: tell the others which call this is, and send a small tensor along.

    Two different collective calls that meet abort the process inside gloo, so a packet that has one size for all calls goes first.

    Returns:
        Every rank's ``value``, or None if there is none or it does not fit into the packet.

    Raises:
        FxChimeraError: The ranks make different calls.
    """
    return announced(begin_announcing(what, value, size, group), value)


def begin_announcing(
    what: str, value: torch.Tensor | None, size: int, group: dist.ProcessGroup
) -> tuple[dist.Work, list[torch.Tensor]]:
    """Start what :func:`announce` does, without waiting; :func:`announced` takes what this returns."""
    packet = bytearray(_PACKET_BYTES)
    name = what.encode()[:_NAME_BYTES]
    packet[: len(name)] = name
    if value is not None and _fits(value):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        packet[_NAME_BYTES : _NAME_BYTES + value.nbytes] = flat.numpy().tobytes()
    packets = list(torch.empty((size, _PACKET_BYTES), dtype=torch.uint8, device="cpu").unbind())
    work = dist.all_gather(packets, torch.frombuffer(packet, dtype=torch.uint8), group=group, async_op=True)
    assert work is not None
    return work, packets


def announced(begun: tuple[dist.Work, list[torch.Tensor]], value: torch.Tensor | None) -> list[torch.Tensor] | None:
    """Wait for the packets; check and return as :func:`announce`."""
    work, packets = begun
    work.wait()
    texts = [other.numpy()[:_NAME_BYTES].tobytes() for other in packets]
    if len(set(texts)) > 1:
        names = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
        calls = "; ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
        raise FxChimeraError(f"the ranks make different calls: {calls}; every rank must make the same calls in the same order")
    if value is None or not _fits(value):
        return None
    end = _NAME_BYTES + value.nbytes
    return [other[_NAME_BYTES:end].clone().view(value.dtype).reshape(value.shape) for other in packets]


def _fits(value: torch.Tensor) -> bool:
    """Whether ``value`` goes along with an announcement."""
    return _NAME_BYTES + value.nbytes <= _PACKET_BYTES


def destroy(group: dist.ProcessGroup) -> None:
    """Destroy a group and close its connections, unless the user has destroyed all groups already."""
    with contextlib.suppress(ValueError, AssertionError):
        dist.destroy_process_group(group)


def open_devices() -> list[ProcessGroupGloo.Device]:
    """Return gloo devices for any number of pairs: torch's choice, or those of the interfaces that the user has named.

    A device has a thread that wakes a hundred times a second, and ``new_group`` makes a device for every group: with the forty
    groups of a few pipelines these threads took more processor time than all else.
    """
    names = [name for name in os.environ.get(_INTERFACES, "").split(",") if name]
    return [ProcessGroupGloo.create_device(interface=name) for name in names] or [ProcessGroupGloo.create_default_device()]


def connect(
    store: Store, name: str, rank: int, pair: Sequence[int], devices: list[ProcessGroupGloo.Device], timeout: datetime.timedelta
) -> ProcessGroupGloo:
    """Connect the two ranks of ``pair`` under a ``name`` that only they use; the connection is closed with the last reference.

    torch's public ``new_group`` has no place for a device, so this uses the options of its gloo backend (tried on torch 2.13).
    """
    options = ProcessGroupGloo._Options()
    options._devices, options._threads, options._timeout = devices, 1, timeout
    return ProcessGroupGloo(PrefixStore(name, store), sorted(pair).index(rank), len(pair), options)
