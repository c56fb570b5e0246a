"""torch's process groups: made from torchrun's environment, and destroyed; and connections of our own."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from fxchimera_passes._torch import record_ranges

__all__ = ["Group", "connect", "destroy", "join", "open_devices"]

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


class Group(Protocol):
    """What is used of torch's gloo group; its type hints leave the calls out."""

    def rank(self) -> int:
        """This rank's number in the group."""

    def size(self) -> int:
        """The number of ranks."""

    def send(self, tensors: list[torch.Tensor], other: int, tag: int) -> dist.Work:
        """Start to send one tensor."""

    def recv(self, tensors: list[torch.Tensor], other: int, tag: int) -> dist.Work:
        """Start to receive one tensor."""


class _Unprofiled:
    """A group whose calls torch's profiler does not see.

    It would open a range that is closed by whoever waits for the work.  When that is after the profile's end, as for a send that
    nobody waits for in its step, torch writes into memory that is gone (seen with torch 2.13).
    """

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        self._send, self._recv = group.send, group.recv

    def send(self, tensors: list[torch.Tensor], other: int, tag: int) -> dist.Work:
        record_ranges(False)
        try:
            return self._send(tensors, other, tag)
        finally:
            record_ranges(True)

    def recv(self, tensors: list[torch.Tensor], other: int, tag: int) -> dist.Work:
        record_ranges(False)
        try:
            return self._recv(tensors, other, tag)
        finally:
            record_ranges(True)


def destroy(group: dist.ProcessGroup) -> None:
    """Destroy a group and close its connections, unless the user has destroyed all groups already."""
    with contextlib.suppress(ValueError, AssertionError):
        dist.destroy_process_group(group)


def open_devices() -> list[ProcessGroupGloo.Device]:
    """Return gloo devices for any number of groups: torch's choice, or those of the interfaces that the user has named.

    A device has a thread that wakes a hundred times a second, and ``new_group`` makes a device for every group: with the forty
    groups of a few pipelines these threads took more processor time than all else.
    """
    names = [name for name in os.environ.get(_INTERFACES, "").split(",") if name]
    return [ProcessGroupGloo.create_device(interface=name) for name in names] or [ProcessGroupGloo.create_default_device()]


def connect(
    store: Store, name: str, rank: int, ranks: Sequence[int], devices: list[ProcessGroupGloo.Device], timeout: datetime.timedelta
) -> Group:
    """Connect some ``ranks`` under a ``name`` that only they use; the connections are closed with the last reference.

    torch's public ``new_group`` has no place for a device, so this uses the options of its gloo backend (tried on torch 2.13).
    """
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads, options._timeout = devices, 1, timeout
    group: Any = ProcessGroupGloo(PrefixStore(name, store), sorted(ranks).index(rank), len(ranks), options)
    return _Unprofiled(group)
