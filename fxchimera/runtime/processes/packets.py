"""One small packet of every rank comes to every rank, in as many rounds as D has digits to the base 4.

torch's all-gather goes round a ring: D - 1 messages one after the other, of which each wakes a rank that sleeps.

    round 0   own packet                to the ranks 1, 2 and 3 before, and those of the ranks 1, 2 and 3 after come in
    round 1   the 4 packets so far      to the ranks 4, 8 and 12 before, and as many come in; then 16, and so on
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.processes.wires import read, write
from fxchimera.runtime.transport import Channel

__all__ = ["Packets"]

_NAME_BYTES = 96
_PACKET_BYTES = 2048


class Packets:
    """One rank's part; its ``wires`` are those of the ``channels`` that begin or end at it, and wait in naps."""

    def __init__(self, rank: int, size: int, wires: Mapping[Channel, socket.socket]) -> None:
        self._rank, self._size, self._wires = rank, size, wires

    @staticmethod
    def channels(size: int) -> list[Channel]:
        """The channels that ``size`` ranks need, in one order on all of them."""
        away = [step for steps in _rounds(size) for step in steps]
        return [_channel(rank, step, size) for step in away for rank in range(size)]

    def exchange(self, what: str, value: torch.Tensor | None, between: Callable[[], None]) -> list[torch.Tensor] | None:
        """Collective: tell the others which call this is, and bring every rank's small ``value`` to every rank.

        Two different collective calls of torch's that meet abort the process inside gloo, so a packet that has one size for all
        calls goes first.  Returns None if there is no value or it does not fit into the packet.  ``between`` naps is called what
        ends the wait by raising.

        Raises:
            FxChimeraError: The ranks make different calls.
            OSError: A connection broke.
        """
        rank, size = self._rank, self._size
        held = bytearray(size * _PACKET_BYTES)  # row i: the packet of rank + i
        rows = memoryview(held)
        name = what.encode()[:_NAME_BYTES]
        held[: len(name)] = name
        if value is not None and _fits(value):
            place = slice(_NAME_BYTES, _NAME_BYTES + value.nbytes)
            rows[place] = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for steps in _rounds(size):
            have = steps[0]
            for away in steps:
                write(self._wires[_channel(rank, away, size)], rows[: min(have, size - away) * _PACKET_BYTES], between)
            for away in steps:
                end = min(away + have, size)
                wire = self._wires[_channel((rank + away) % size, away, size)]
                read(wire, rows[away * _PACKET_BYTES : end * _PACKET_BYTES], between)
        return _values([rows[(other - rank) % size * _PACKET_BYTES :][:_PACKET_BYTES] for other in range(size)], value)

    def close(self) -> None:
        """Close the connections."""
        for wire in self._wires.values():
            wire.close()


def _rounds(size: int) -> list[list[int]]:
    powers = [4**i for i in range(size) if 4**i < size]
    return [[have * i for i in (1, 2, 3) if have * i < size] for have in powers]


def _channel(rank: int, away: int, size: int) -> Channel:
    """From ``rank`` to the rank that many before it."""
    return rank, (rank - away) % size, f"packets {away}"


def _fits(value: torch.Tensor) -> bool:
    """Whether ``value`` goes along with an announcement."""
    return _NAME_BYTES + value.nbytes <= _PACKET_BYTES


def _values(packets: list[Any], value: torch.Tensor | None) -> list[torch.Tensor] | None:
    texts = [bytes(packet[:_NAME_BYTES]) for packet in packets]
    if len(set(texts)) > 1:
        names = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
        calls = "; ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
        raise FxChimeraError(f"the ranks make different calls: {calls}; every rank must make the same calls in the same order")
    if value is None or not _fits(value):
        return None
    count = value.numel()
    return [torch.frombuffer(packet, dtype=value.dtype, count=count, offset=_NAME_BYTES).view(value.shape) for packet in packets]
