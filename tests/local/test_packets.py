"""Every rank's packet comes to every rank, for any number of ranks, call after call, over pairs of sockets."""

from __future__ import annotations

import socket
import threading

import pytest
import torch

from fxchimera import FxChimeraError
from fxchimera.runtime.processes.packets import Packets


def never() -> None:
    """Nobody fails here."""


def gather(size: int, calls: list[list[str]]) -> list[list[object]]:
    """Let ``size`` ranks make their calls at once; rank r sends r + 100 in its first call, r + 200 in its second."""
    pairs = {channel: socket.socketpair() for channel in Packets.channels(size)}
    found: list[list[object]] = [[] for _ in range(size)]

    def work(rank: int) -> None:
        ends = {channel: pair[end] for channel, pair in pairs.items() for end in (0, 1) if channel[end] == rank}
        packets = Packets(rank, size, ends)
        for number, what in enumerate(calls[rank]):
            try:
                gathered = packets.exchange(what, torch.tensor([rank + 100.0 * (number + 1)]), never)
                found[rank].append([float(value) for value in gathered or []])
            except FxChimeraError as error:
                found[rank].append(str(error))
        packets.close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 21])
def test_every_packet_comes_to_every_rank(size: int) -> None:
    expected = [[rank + 100.0 * call for rank in range(size)] for call in (1, 2, 3)]
    assert gather(size, [["a step"] * 3] * size) == [expected] * size


def test_ranks_that_make_different_calls_are_told_and_can_go_on() -> None:
    found = gather(5, [["a step", "a step"]] * 4 + [["a save", "a step"]])
    assert all("rank 3: a step; rank 4: a save" in str(answers[0]) for answers in found)
    assert all(answers[1] == [200.0, 201.0, 202.0, 203.0, 204.0] for answers in found)


def test_what_does_not_fit_is_left_to_the_caller() -> None:
    """A big value is announced by its name only."""
    assert Packets(0, 1, {}).exchange("big", torch.zeros(4096), never) is None
