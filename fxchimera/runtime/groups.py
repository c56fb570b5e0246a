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

from fxchimera.errors import FxChimeraError
from fxchimera_passes._torch import record_ranges

__all__ = ["Group", "Packets", "connect", "destroy", "join", "open_devices"]

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


class Packets:
    """Brings one small packet of every rank to every rank in as many rounds as D has digits to the base 4.

    torch's all-gather goes round a ring: D - 1 messages one after the other, of which each wakes a rank that sleeps.

        round 0   own packet                to the ranks 1, 2 and 3 before, and those of the ranks 1, 2 and 3 after come in
        round 1   the 4 packets so far      to the ranks 4, 8 and 12 before, and as many come in; then 16, and so on
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._going: list[tuple[dist.Work, torch.Tensor]] = []

    def begin(self, what: str, value: torch.Tensor | None) -> Callable[[], list[torch.Tensor] | None]:
        """Collective: tell the others which call this is, and send a small tensor along; what is returned waits for theirs.

        Two different collective calls that meet abort the process inside gloo, so a packet that has one size for all calls goes
        first.  The function returned gives every rank's ``value``, or None if there is none or it does not fit into the packet,
        and raises :class:`FxChimeraError` if the ranks make different calls.
        """
        rank, size = self._group.rank(), self._group.size()
        held = torch.zeros((size, _PACKET_BYTES), dtype=torch.uint8, device="cpu")  # row i: the packet of rank + i
        name = what.encode()[:_NAME_BYTES]
        own = held[0].numpy()
        own[: len(name)] = memoryview(name)
        if value is not None and _fits(value):
            own[_NAME_BYTES : _NAME_BYTES + value.nbytes] = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        rounds = [[have * i for i in (1, 2, 3) if have * i < size] for have in _powers_of_four(size)]
        coming = [
            [self._group.recv([held[away : away + offsets[0]]], (rank + away) % size, away) for away in offsets]
            for offsets in rounds
        ]

        def send(offsets: list[int]) -> None:
            for away in offsets:
                part = held[: min(offsets[0], size - away)]
                self._going.append((self._group.send([part], (rank - away) % size, away), held))

        def finish() -> list[torch.Tensor] | None:
            sent, self._going = self._going[:before], self._going[before:]
            for number, works in enumerate(coming, start=1):
                for work in works:
                    work.wait()
                send(rounds[number] if number < len(rounds) else [])
            for work, _ in sent:  # those of the call before; nobody has to wait for them now
                work.wait()
            return _read(list(held.roll(rank, 0)), value)

        before = len(self._going)
        send(rounds[0] if rounds else [])
        return finish


def _powers_of_four(limit: int) -> list[int]:
    return [4**i for i in range(limit) if 4**i < limit]


def _read(packets: list[torch.Tensor], value: torch.Tensor | None) -> list[torch.Tensor] | None:
    texts = [packet.numpy()[:_NAME_BYTES].tobytes() for packet in packets]
    if len(set(texts)) > 1:
        names = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
        calls = "; ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
        raise FxChimeraError(f"the ranks make different calls: {calls}; every rank must make the same calls in the same order")
    if value is None or not _fits(value):
        return None
    end = _NAME_BYTES + value.nbytes
    return [packet[_NAME_BYTES:end].clone().view(value.dtype).reshape(value.shape) for packet in packets]


def _fits(value: torch.Tensor) -> bool:
    """Whether ``value`` goes along with an announcement."""
    return _NAME_BYTES + value.nbytes <= _PACKET_BYTES


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
